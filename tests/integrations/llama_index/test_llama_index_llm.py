"""Completions: what a response holds, and which options of a call reach the decoder."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import LLM, ChatMessage, CompletionResponse, CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, PromptError, methods
from cocoa_integrations._shared.settings import OF_SAMPLING, config_of
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent
from tests.helpers.alike import close, near
from tests.helpers.llama_index_helpers import PROMPT, Listener
from tests.helpers.reports import all_spans, risk_report


@pytest.fixture(scope="module")
def engine(block_engine: CocoaEngine) -> CocoaEngine:
    """The real model."""
    return block_engine


def test_complete_answers_as_the_engine_does(llm: CocoaLLM, engine: CocoaEngine) -> None:
    expected = engine.generate(PROMPT, max_new_tokens=8)
    response = llm.complete(PROMPT)
    assert response.text == expected.text
    assert not response.text.startswith(PROMPT)
    assert response.delta is None
    assert response.additional_kwargs == {"cocoa_spans": all_spans(expected), "cocoa_risk": risk_report(expected)}
    assert response.raw is not None
    assert response.raw["cocoa_risk"] == risk_report(expected)
    assert response.raw["finish_reason"] == "length"
    assert response.raw["model"] == response.raw["model_name"] == engine.model_name


def test_dola_answers_as_the_engine_does(llm: CocoaLLM, engine: CocoaEngine) -> None:
    expected = engine.generate(PROMPT, method="dola", max_new_tokens=8)
    assert expected.text != llm.complete(PROMPT).text
    made_with = CocoaLLM(engine=engine, max_new_tokens=8, method="dola", risk_metadata="full")
    *_, streamed = made_with.stream_complete(PROMPT)
    for response in (made_with.complete(PROMPT), llm.complete(PROMPT, method="dola"), streamed):
        assert response.text == expected.text
        assert close(response.additional_kwargs["cocoa_risk"], risk_report(expected))
    chat = engine.chat([{"role": "user", "content": PROMPT}], method="dola", max_new_tokens=8)
    assert made_with.chat([ChatMessage(PROMPT)]).message.content == chat.text


def test_stream_hands_out_each_span_then_the_whole_report(llm: CocoaLLM) -> None:
    whole = llm.complete(PROMPT)
    *chunks, last = llm.stream_complete(PROMPT)
    assert len(chunks) > 1
    text = ""
    for chunk in chunks:
        text += chunk.delta or ""
        assert chunk.text == text
        (span,) = chunk.additional_kwargs["cocoa_spans"]
        assert whole.text[span["start"] : span["end"]] == span["text"] == chunk.delta
        assert chunk.raw == {"cocoa_spans": [span]}
    spans = [chunk.additional_kwargs["cocoa_spans"][0] for chunk in chunks]
    assert spans == whole.additional_kwargs["cocoa_risk"]["spans"]
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == whole.logprobs
    report = {"cocoa_risk": whole.additional_kwargs["cocoa_risk"]}
    assert last == whole.model_copy(update={"delta": "", "additional_kwargs": report})


def test_what_one_changes_in_a_response_the_other_does_not_see(llm: CocoaLLM, heard: Listener) -> None:
    *chunks, last = llm.stream_complete(PROMPT)
    for response in (*chunks, last, llm.complete(PROMPT)):
        kept = json.dumps(response.raw)
        for value in response.additional_kwargs.values():
            value.clear()
        assert json.dumps(response.raw) == kept
    assert all(event.report["spans"] for event in heard.of(CocoaRiskEvent))


def test_responses_are_plain_json(llm: CocoaLLM) -> None:
    for response in [llm.complete(PROMPT), *llm.stream_complete(PROMPT)]:
        assert CompletionResponse.model_validate(json.loads(response.model_dump_json())) == response


def test_logprobs_are_those_of_the_tokens(llm: CocoaLLM, engine: CocoaEngine) -> None:
    spans = engine.generate(PROMPT, max_new_tokens=8).spans
    expected = [log_prob for span in spans for log_prob in span.token_log_probs]
    entries = llm.complete(PROMPT).logprobs
    assert entries is not None
    assert [entry.logprob for (entry,) in entries] == near(expected)
    assert "".join(entry.token for (entry,) in entries) == "".join(span.text for span in spans)
    assert bytes(byte for (entry,) in entries for byte in entry.bytes).decode() == llm.complete(PROMPT).text


@pytest.mark.parametrize("method", ["complete", "stream_complete", "chat", "stream_chat"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_token_counters_read_the_usage(method: str, asynchronous: bool, engine: CocoaEngine) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 1000)  # would show if it counted by itself
    llm = CocoaLLM(engine=engine, max_new_tokens=4, callback_manager=CallbackManager([counter]))
    asked = [ChatMessage(PROMPT)] if "chat" in method else PROMPT
    if asynchronous:
        answer = await getattr(llm, f"a{method}")(asked)
        if "stream" in method:
            assert [chunk async for chunk in answer]
    else:
        answer = getattr(llm, method)(asked)
        if "stream" in method:
            assert list(answer)
    prompt = engine.encode_chat([{"role": "user", "content": PROMPT}]) if "chat" in method else engine.encode(PROMPT)
    (event,) = counter.llm_token_counts
    assert (event.prompt_token_count, event.completion_token_count) == (len(prompt), 4)
    assert event.total_token_count == counter.total_llm_token_count == len(prompt) + 4


SETTINGS: dict[str, Any] = {
    "method": "cocoa",
    "metric": "con_mlds",
    "risk": "f_mlds",
    "alpha": 0.5,
    "gamma": 0.2,
    "max_candidates": 3,
    "max_span_tokens": 2,
    "span_boundary": "own",
    "span_log_prob": "mean",
    "middle_layers": (5, 15),
    "final_layer": "pre_norm",
    "dola_layers": "low",
    "dola_relative_top": 0.2,
    "decore_heads": str(Path(methods.__file__).with_name("embedded_heads.json")),
    "decore_masked_heads": 3,
    "diver_weight": 0.5,
    "repetition_penalty": 1.3,
    "max_risk": 1.0,
    "max_new_tokens": 3,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "seed": 7,
    "top_logprobs": 2,
    "stop": ("Rome",),
}


def test_there_is_a_case_for_every_setting() -> None:
    assert SETTINGS.keys() == CocoaConfig.model_fields.keys()
    assert all(getattr(CocoaConfig(), name) != value for name, value in SETTINGS.items())


def needed_by(name: str) -> dict[str, Any]:
    """Settings without which a setting is refused."""
    return {"method": "sample"} if name in OF_SAMPLING else {}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_an_option_of_constructor_and_call(
    name: str, llm: CocoaLLM, engine: CocoaEngine, heard: Listener
) -> None:
    short = {"max_new_tokens": 2, name: SETTINGS[name], **needed_by(name)}
    llm.complete(PROMPT, **short)
    CocoaLLM(engine=engine, **short).complete(PROMPT)
    used = [event.generation.config for event in heard.of(CocoaRiskEvent)]
    assert used == [CocoaConfig(**short)] * 2
    assert config_of(llm) == CocoaConfig(max_new_tokens=8)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_read_and_set(name: str, llm: CocoaLLM, heard: Listener) -> None:
    assert getattr(llm, name) == getattr(CocoaConfig(max_new_tokens=8), name)
    llm.max_new_tokens = 2
    setattr(llm, name, SETTINGS[name])
    for needed, value in needed_by(name).items():
        setattr(llm, needed, value)
    list(llm.stream_complete(PROMPT))
    (event,) = heard.of(CocoaRiskEvent)
    assert event.generation.config == CocoaConfig(**{"max_new_tokens": 2, name: SETTINGS[name], **needed_by(name)})
    assert llm.metadata.num_output == llm.max_new_tokens


def test_a_setting_set_to_nonsense_is_refused(llm: CocoaLLM) -> None:
    llm.alpha = -1.0
    with pytest.raises(ConfigError, match="alpha"):
        llm.complete(PROMPT)


def test_options_set_later_are_honoured(llm: CocoaLLM, engine: CocoaEngine) -> None:
    token_ids = engine.generate(PROMPT, max_new_tokens=8).token_ids
    first = engine.decode(token_ids[: token_ids.index(token_ids[3]) + 1])
    llm.stopping_ids = [token_ids[3]]
    assert llm.complete(PROMPT).text == first
    llm.stopping_ids = []
    llm.generate_kwargs = {"eos_token_id": token_ids[3], "max_new_tokens": 7}
    assert llm.complete(PROMPT).text == first
    assert llm.metadata.num_output == 7
    llm.generate_kwargs = {"top_k": 50}
    with pytest.raises(ConfigError, match="top_k"):
        llm.complete(PROMPT)


def test_settings_of_a_call_change_its_answer_only(llm: CocoaLLM) -> None:
    before = llm.complete(PROMPT).text
    assert llm.complete(PROMPT, max_new_tokens=2).raw["usage"]["completion_tokens"] == 2  # type: ignore[index]
    assert llm.complete(PROMPT).text == before


@pytest.mark.parametrize("how", ["constructor", "call", "stop_strings"])
def test_stop_texts_are_cut_off(how: str, llm: CocoaLLM, engine: CocoaEngine) -> None:
    text = llm.complete(PROMPT).text
    stop = text[3:6]
    if how == "constructor":
        response = CocoaLLM(engine=engine, max_new_tokens=8, stop=stop).complete(PROMPT)
    elif how == "call":
        response = llm.complete(PROMPT, stop=[stop])
    else:
        response = CocoaLLM(engine=engine, max_new_tokens=8, generate_kwargs={"stop_strings": stop}).complete(PROMPT)
    assert response.text == text[:3]
    assert response.raw is not None
    assert response.raw["finish_reason"] == "stop"


def test_system_prompt_and_wrappers_are_applied_as_llama_index_does(engine: CocoaEngine, heard: Listener) -> None:
    llm = CocoaLLM(
        engine=engine,
        max_new_tokens=4,
        system_prompt="Answer briefly.",
        query_wrapper_prompt="Q: {query_str}\nA:",
        completion_to_prompt=lambda prompt: f"[{prompt}]",
    )
    assert not llm.metadata.is_chat_model  # else LlamaIndex would not use the wrappers
    expected = engine.generate("Q: Answer briefly.\n\n[Name a colour.]\nA:", max_new_tokens=4)
    assert llm.complete("Name a colour.").text == expected.text
    assert llm.predict(PromptTemplate("Name a colour.")) == expected.text
    assert llm.complete("Q: Answer briefly.\n\n[Name a colour.]\nA:", formatted=True).text == expected.text
    assert {event.generation.usage.prompt_tokens for event in heard.of(CocoaRiskEvent)} == {
        expected.usage.prompt_tokens
    }


def test_a_prompt_that_brings_its_bos_token_gets_no_second_one(engine: CocoaEngine) -> None:
    class AddsBos:
        bos_token = "<|im_start|>"

        def __getattr__(self, name: str) -> Any:
            return getattr(engine.tokenizer, name)

        def __call__(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> Any:
            return engine.tokenizer(self.bos_token * add_special_tokens + text, add_special_tokens=False, **options)

        def encode(self, text: str, **options: Any) -> list[int]:
            ids: list[int] = self(text, **options)["input_ids"]
            return ids

    llm = CocoaLLM(model=engine.model, tokenizer=AddsBos(), max_new_tokens=1)
    plain, written_out = llm.complete(PROMPT), llm.complete("<|im_start|>" + PROMPT)
    assert plain.raw is not None
    assert written_out.raw is not None
    assert plain.raw["usage"] == written_out.raw["usage"]
    assert plain.raw["usage"]["prompt_tokens"] == 1 + len(engine.encode(PROMPT))


def test_threads_may_share_it(llm: CocoaLLM) -> None:
    prompts = [PROMPT, "2 + 2 ="]
    alone = [llm.complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(llm.complete, prompts))
    assert [response.text for response in together] == [response.text for response in alone]
    for one, other in zip(together, alone, strict=True):
        assert close(one.additional_kwargs, other.additional_kwargs)


@pytest.mark.parametrize("method", ["complete", "stream_complete"])
def test_the_context_window_asked_for_is_kept(method: str, llm: CocoaLLM, engine: CocoaEngine) -> None:
    size = len(engine.encode(PROMPT))
    short = CocoaLLM(engine=engine, context_window=size + 2)
    answer = getattr(short, method)(PROMPT)
    whole = answer if method == "complete" else list(answer)[-1]
    assert (whole.raw["usage"]["completion_tokens"], whole.raw["finish_reason"]) == (2, "length")
    llm.context_window = size
    with pytest.raises(PromptError, match=f"{size} tokens and context_window is {size}.*at least 1 token"):
        getattr(llm, method)(PROMPT)


@pytest.mark.parametrize("end", ["eos", "stop"])
def test_logprobs_are_those_of_the_text_after_an_end(end: str, llm: CocoaLLM) -> None:
    question = [ChatMessage("What is the capital of France?")]
    plain = llm.chat(question, max_new_tokens=32)
    text = plain.message.content or ""
    stop = [text[8:10]] if end == "stop" else []
    response = llm.chat(question, max_new_tokens=32, stop=stop)
    assert response.raw is not None
    assert response.raw["finish_reason"] == end
    chunks = list(llm.stream_chat(question, max_new_tokens=32, stop=stop))[:-1]
    for entries in (response.logprobs or [], [entry for chunk in chunks for entry in chunk.logprobs or []]):
        assert "".join(entry.token for (entry,) in entries) == response.message.content
        assert bytes(byte for (entry,) in entries for byte in entry.bytes).decode() == response.message.content
    assert response.message.content == (text[:8] if end == "stop" else text)


@pytest.mark.parametrize("method", ["complete", "stream_complete"])
def test_bad_prompts_raise_when_asked(method: str, llm: CocoaLLM) -> None:
    with pytest.raises(PromptError, match="empty"):
        getattr(llm, method)("")
    with pytest.raises(PromptError, match="8192"):
        getattr(llm, method)("word " * 9000)


@pytest.mark.parametrize("method", ["complete", "stream_complete"])
def test_bad_options_of_a_call_raise_when_asked(method: str, llm: CocoaLLM) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'alhpa' \(did you mean 'alpha'"):
        getattr(llm, method)(PROMPT, alhpa=1.0)
    with pytest.raises(ConfigError, match="alpha"):
        getattr(llm, method)(PROMPT, alpha=-1.0)


@pytest.mark.parametrize("base", [CustomLLM, FunctionCallingLLM])
def test_it_is_what_the_frameworks_bases_are_and_no_default_of_theirs_is_used(base: type[LLM]) -> None:
    """Those of ``CustomLLM`` block the event loop, and lose the report and the chat template."""
    kind = CocoaLLM
    assert issubclass(kind, base)
    promised = [name for name in dir(base) if callable(getattr(base, name)) and not name.startswith("_")]
    owners = {name: next(each for each in kind.__mro__ if name in vars(each)) for name in promised}
    assert [name for name, owner in owners.items() if owner is CustomLLM] == []
    ours = {*vars(CustomLLM), *vars(LLM)} & {"chat", "stream_chat", "achat", "astream_chat", "class_name"}
    assert {owners[name] for name in ours} == {kind}
    tools = owners.get("get_tool_calls_from_response", kind)
    assert tools.__module__.startswith("cocoa_integrations")
    assert kind.complete is not CustomLLM.complete
    assert kind.metadata is not base.metadata
