"""``max_risk``: an answer stops after its first span whose risk reaches it; no pass is run for what would follow."""

from __future__ import annotations

import asyncio
import math
import warnings
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from llama_index.core.llms import ChatMessage

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, Generation, Runtime, Span
from cocoa_integrations.langchain import ChatCocoa, get_risk
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.alike import assert_alike, near
from tests.helpers.engines import endless
from tests.helpers.forward_passes import Pass, record
from tests.helpers.made_up_risk import fitted
from tests.helpers.prompts import PROMPTS, chat
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPT = "the ring is a thing"
METHODS = ("greedy", "cocoa", "cocoa-sig", "diver", "dola", "decore", "sample")


def first_at(spans: list[Span], limit: float) -> int:
    return next(number for number, span in enumerate(spans) if span.risk >= limit)


def limit_of(full: Generation) -> float:
    """A limit that is passed neither by the first span nor only by the last."""
    highest = list(accumulate((span.risk for span in full.spans), max))
    rises = [n for n in range(1, len(highest) - 1) if highest[n] > highest[n - 1] + 1e-3]
    assert rises, highest
    n = rises[len(rises) // 2]
    return (highest[n - 1] + highest[n]) / 2


def assert_stopped_as(stopped: Generation, full: Generation, limit: float) -> None:
    """The spans of the whole answer up to the first that reaches the limit, which alone is marked."""
    end = first_at(full.spans, limit)
    assert stopped.finish_reason == "risk"
    assert [span.reaches_max_risk for span in stopped.spans] == [False] * end + [True]
    for span, whole in zip(stopped.spans, full.spans[: end + 1], strict=True):
        assert (span.token_ids, span.kind, span.start) == (whole.token_ids, whole.kind, whole.start)
    assert [span.text for span in stopped.spans[:-1]] == [span.text for span in full.spans[:end]]
    assert stopped.spans[-1].text.startswith(full.spans[end].text)  # then bytes that now never make a character
    assert [span.risk for span in stopped.spans] == near([s.risk for s in full.spans[: end + 1]])
    assert Generation.model_validate_json(stopped.model_dump_json()) == stopped


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_pass_is_run_after_the_span(method: str, tmp_path: Path) -> None:
    engine = endless()
    settings = {"max_new_tokens": 24, "max_span_tokens": 4, "final_layer": "pre_norm"}
    config = config_of(method, engine.model, tmp_path, **settings)
    engine.generate(PROMPT, config=config)  # whatever is tried out first
    passes: list[Pass] = record(engine)
    after: list[int] = []  # each span, the passes run when it was decided
    with engine.stream(PROMPT, config=config) as stream:
        after = [len(passes) for _ in stream]
    full = stream.generation
    assert full is not None
    limit = limit_of(full)
    passes.clear()
    stopped = engine.generate(PROMPT, config=config, max_risk=limit)
    assert_stopped_as(stopped, full, limit)
    assert len(passes) == after[first_at(full.spans, limit)] < after[-1]
    assert stopped.usage.forward_passes < full.usage.forward_passes


def test_rows_of_a_batch_stop_by_themselves(tmp_path: Path) -> None:
    engine = CocoaEngine(tiny_model("llama", seed=6), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    prompts = [PROMPT, "a thing", "the ing", "is er"]
    settings: dict[str, Any] = {"max_new_tokens": 16, "max_span_tokens": 4, "final_layer": "pre_norm"}
    full = engine.generate_batch(prompts, **settings)
    limit = median(generation.max_risk for generation in full)
    passes = record(engine)
    answers = engine.generate_batch(prompts, max_risk=limit, **settings)
    assert {"risk"} < {answer.finish_reason for answer in answers}  # not all of them stop
    for answer, whole in zip(answers, full, strict=True):
        if whole.max_risk >= limit:
            assert_stopped_as(answer, whole, limit)
        else:
            assert_alike(answer.model_copy(update={"config": whole.config}), whole)
    assert len(passes[-1].widths) < len(passes[len(prompts)].widths)  # those that stopped have left


def test_calibrated_risk_is_what_counts(engine: CocoaEngine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judged = CocoaEngine(engine.model, engine.tokenizer, calibrator=fitted(model_name=engine.model_name))
        full = judged.generate(chat(PROMPTS["question"]), max_new_tokens=24)
        limit = sum(sorted(span.risk for span in full.spans)[-2:]) / 2
        raw = engine.generate(chat(PROMPTS["question"]), max_new_tokens=24, risk="f_mlds")
        assert limit < raw.spans[0].risk
        assert_stopped_as(judged.generate(chat(PROMPTS["question"]), max_new_tokens=24, max_risk=limit), full, limit)


def test_the_last_span_counts_too_and_a_low_risk_changes_nothing(engine: CocoaEngine) -> None:
    """``finish_reason`` alone tells whether a span reached the limit, even if a stop text ends the answer there."""
    settings: dict[str, Any] = {"max_new_tokens": 20, "stop": "."}
    full = engine.generate(PROMPTS["story"], **settings)
    for limit, reason in ((0.0, "risk"), (full.max_risk + 1e-3, full.finish_reason)):
        answer = engine.generate(PROMPTS["story"], max_risk=limit, **settings)
        assert answer.finish_reason == reason
        assert any(span.reaches_max_risk for span in answer.spans) == (reason == "risk")
    one = engine.generate(PROMPTS["story"], max_risk=0.0, gamma=1, **settings)  # a single span, to the end
    whole = engine.generate(PROMPTS["story"], gamma=1, **settings)
    assert (whole.finish_reason, one.finish_reason) == ("stop" if "." not in whole.text else "length", "risk")
    assert [span.model_copy(update={"reaches_max_risk": False}) for span in one.spans] == whole.spans
    assert (one.text, one.usage) == (whole.text, whole.usage)


def test_the_text_before_a_stop_text_is_the_same(engine: CocoaEngine) -> None:
    """Held back while a stop text may begin there, it is given out when the answer stops."""
    prompt, settings = chat(PROMPTS["question"]), {"max_new_tokens": 24}
    full = engine.generate(prompt, **settings)
    stopped = engine.generate(prompt, max_risk=0.0, **settings)
    half = full.spans[0].text + "never there"
    with engine.stream(prompt, max_risk=0.0, stop=half, **settings) as stream:
        (span,) = stream
    assert (span.text, span.reaches_max_risk) == (stopped.text, True)


def test_the_limit_of_the_setting_and_of_a_scored_text() -> None:
    """A risk that reaches the limit counts, as for a calibrator's own threshold, and for every gate."""
    for value in (-0.1, 2.5, float("nan")):
        with pytest.raises(ConfigError, match="max_risk"):
            CocoaConfig(max_risk=value)
    engine = CocoaEngine(tiny_model("llama", seed=6), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    (span,) = engine.score(PROMPT, "a thing").spans
    assert not span.reaches_max_risk
    for limit, reached in ((span.risk, True), (math.nextafter(span.risk, 2), False)):
        (again,) = engine.score(PROMPT, "a thing", max_risk=limit).spans
        assert again.reaches_max_risk == reached


def test_answers_streams_and_batches_of_the_adapters(engine: CocoaEngine) -> None:
    question, short = "Who invented the telephone?", {"max_new_tokens": 12}
    asked = [{"role": "user", "content": question}]
    expected, full = engine.chat(asked, max_risk=0.1, **short), engine.chat(asked, **short)
    assert_stopped_as(expected, full, 0.1)
    assert len(expected.spans) < len(full.spans)
    model, llm = ChatCocoa(engine=engine, **short), CocoaLLM(engine=engine, **short)
    first, *more = model.stream(question, max_risk=0.1)
    assert isinstance(first, AIMessageChunk)
    for message in (
        model.invoke(question, max_risk=0.1),
        asyncio.run(ChatCocoa(engine=engine, max_risk=0.1, **short).ainvoke(question)),
        *model.batch([question] * 2, max_risk=0.1),
        sum(more, first),
    ):
        assert (message.text, message.response_metadata["finish_reason"]) == (expected.text, "risk")
        assert get_risk(message).to_dict()["spans"][-1]["reaches_max_risk"] is True
    messages = [ChatMessage(content=question)]
    *_, last = llm.stream_chat(messages, max_risk=0.1)
    for answer in (
        llm.chat(messages, max_risk=0.1),
        asyncio.run(CocoaLLM(engine=engine, max_risk=0.1, **short).achat(messages)),
        last,
    ):
        assert (answer.message.content, answer.raw["finish_reason"]) == (expected.text, "risk")
        assert answer.raw["cocoa_risk"]["spans"][-1]["reaches_max_risk"] is True
    assert model.invoke(question).response_metadata["finish_reason"] == "length"
