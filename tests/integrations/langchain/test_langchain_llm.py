"""CocoaLLM: text in, text out, risk in generation_info and callbacks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.outputs import Generation
from langchain_core.prompts import PromptTemplate

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, PromptError
from cocoa_integrations.langchain import CocoaLLM, get_risk, get_spans
from tests.helpers.alike import without_reuse
from tests.helpers.reports import risk_report, to_dicts

PROMPTS = ["The capital of France is", "One, two, three,", "Once upon a time"]


def only(llm: CocoaLLM, prompt: str, **options: Any) -> Generation:
    return llm.generate([prompt], **options).generations[0][0]


def test_an_answer_goes_on_from_the_prompt_as_it_is(engine: CocoaEngine) -> None:
    expected = engine.generate(PROMPTS[0], max_new_tokens=6)
    answer = only(CocoaLLM(engine=engine, max_tokens=6), PROMPTS[0])
    assert answer.text == expected.text  # neither echoed nor wrapped in a chat template
    assert get_risk(answer).to_dict() == risk_report(expected)
    assert answer.generation_info["finish_reason"] == "length"


async def test_every_way_returns_the_same_text(quick_llm: CocoaLLM, spy: Any, live: Any) -> None:
    texts = quick_llm.batch(PROMPTS)
    assert spy.calls == [("generate_batch", PROMPTS)]
    assert texts == [quick_llm.invoke(prompt) for prompt in PROMPTS] == await quick_llm.abatch(PROMPTS)
    quick_llm.batch(PROMPTS, config={"callbacks": [live]}, stream=True)
    assert (live.tokens, live.ends) == ([], len(PROMPTS))  # one end for each answer
    text, pieces = texts[0], list(quick_llm.stream(PROMPTS[0]))
    assert isinstance(text, str)
    assert text
    assert len(pieces) > 2
    assert "".join(pieces) == "".join([piece async for piece in quick_llm.astream(PROMPTS[0])]) == text
    assert await quick_llm.ainvoke(PROMPTS[0]) == text
    assert (PromptTemplate.from_template("{x}") | quick_llm).invoke({"x": PROMPTS[0]}) == text


def test_callbacks_see_each_span_of_a_stream_live(quick_llm: CocoaLLM, live: Any) -> None:
    stream = quick_llm.stream(PROMPTS[0], config={"callbacks": [live]})
    next(stream)
    assert len(live.spans) == 1
    assert live.ends == 0
    rest = list(stream)
    assert rest
    answer = only(quick_llm, PROMPTS[0])
    assert live.spans == to_dicts(get_spans(answer)) == get_risk(answer).to_dict()["spans"]
    assert "".join(live.tokens) == answer.text


def test_invoke_hands_spans_to_callbacks_when_streaming_is_on(
    quick_engine: CocoaEngine, quick_llm: CocoaLLM, live: Any
) -> None:
    llm = CocoaLLM(engine=quick_engine, max_tokens=12, streaming=True)
    answer = only(llm, PROMPTS[0], callbacks=[live])
    expected = only(quick_llm, PROMPTS[0])
    assert answer.text == expected.text
    assert without_reuse(answer.generation_info) == without_reuse(expected.generation_info)
    assert live.spans == to_dicts(get_spans(answer))


def test_usage_is_counted_for_a_batch(quick_engine: CocoaEngine, quick_llm: CocoaLLM) -> None:
    result = quick_llm.generate(PROMPTS)
    usage = [answer.generation_info["usage_metadata"] for [answer] in result.generations]
    assert [one["input_tokens"] for one in usage] == [len(quick_engine.encode(prompt)) for prompt in PROMPTS]
    counts = [sum(one[f"{name}_tokens"] for one in usage) for name in ("input", "output", "total")]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert result.llm_output["token_usage"] == dict(zip(names, counts, strict=True))


def test_settings_of_a_call_apply_and_do_not_stay(quick_llm: CocoaLLM) -> None:
    first = to_dicts(get_spans(only(quick_llm, PROMPTS[0])))[0]
    other = only(quick_llm, PROMPTS[0], alpha=0.5, max_tokens=3)
    assert to_dicts(get_spans(other))[0]["score"] != first["score"]
    assert other.generation_info["usage_metadata"]["output_tokens"] == 3
    assert quick_llm.bind(max_tokens=3, alpha=0.5).invoke(PROMPTS[0]) == other.text
    assert "".join(quick_llm.stream(PROMPTS[0], max_tokens=3, alpha=0.5)) == other.text
    assert quick_llm.batch(PROMPTS[:2], max_tokens=3, alpha=0.5)[0] == other.text
    assert to_dicts(get_spans(only(quick_llm, PROMPTS[0])))[0] == first


def test_stop_texts_end_an_answer(quick_llm: CocoaLLM) -> None:
    quick_llm = quick_llm.model_copy(update={"span_log_prob": "sum"})  # candidates that end may be kept
    text = quick_llm.invoke(PROMPTS[0])
    stop = text[3:5]
    expected = text.split(stop)[0]
    assert quick_llm.invoke(PROMPTS[0], stop=[stop]) == expected
    assert quick_llm.batch(PROMPTS[:1], stop=[stop]) == [expected]
    assert "".join(quick_llm.stream(PROMPTS[0], stop=[stop])) == expected
    assert only(quick_llm, PROMPTS[0], stop=[stop]).generation_info["finish_reason"] == "stop"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_bad_prompt_of_a_batch_fails_alone(asynchronous: bool, quick_llm: CocoaLLM, live: Any) -> None:
    prompts: list[Any] = ["One, two,", "a\ud800b", "", "Once upon"]
    options: dict[str, Any] = {"config": {"callbacks": [live]}, "return_exceptions": True, "max_tokens": 3}
    answers = asyncio.run(quick_llm.abatch(prompts, **options)) if asynchronous else quick_llm.batch(prompts, **options)
    expected = quick_llm.batch([prompts[0], prompts[3]], max_tokens=3)
    assert [answers[0], answers[3]] == expected
    assert all(isinstance(answer, PromptError) for answer in answers[1:3])
    assert live.ends == 2
    for wrong, message in ((prompts, "surrogate"), ([""], "empty"), (["a", ""], "empty")):
        with pytest.raises(PromptError, match=message):
            quick_llm.batch(wrong)
    with pytest.raises(PromptError, match="empty"):
        quick_llm.invoke("")
    assert quick_llm.batch([], return_exceptions=True) == []
    errors = quick_llm.batch(["Hi", "Ho"], return_exceptions=True, gamma=7)
    assert all(isinstance(error, ConfigError) for error in errors)
