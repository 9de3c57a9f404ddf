"""Completions: what a response holds, and which options of a call reach the decoder."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import LLM, ChatMessage, CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, PromptError
from cocoa_integrations._shared.settings import config_of
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent
from tests.helpers.alike import near
from tests.helpers.llama_index_helpers import PROMPT, Listener
from tests.helpers.reports import all_spans, risk_report


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


def test_logprobs_are_those_of_the_tokens(llm: CocoaLLM, engine: CocoaEngine) -> None:
    spans = engine.generate(PROMPT, max_new_tokens=8).spans
    expected = [log_prob for span in spans for log_prob in span.token_log_probs]
    entries = llm.complete(PROMPT).logprobs
    assert entries is not None
    assert [entry.logprob for (entry,) in entries] == near(expected)
    assert "".join(entry.token for (entry,) in entries) == "".join(span.text for span in spans)
    assert bytes(byte for (entry,) in entries for byte in entry.bytes).decode() == llm.complete(PROMPT).text


@pytest.mark.parametrize("method", ["complete", "achat", "stream_chat"])
async def test_token_counters_read_the_usage(method: str, engine: CocoaEngine) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 1000)  # would show if it counted by itself
    llm = CocoaLLM(engine=engine, max_new_tokens=4, callback_manager=CallbackManager([counter]))
    answer: Any = getattr(llm, method)([ChatMessage(PROMPT)] if "chat" in method else PROMPT)
    assert await answer if method == "achat" else list(answer)
    prompt = engine.encode_chat([{"role": "user", "content": PROMPT}]) if "chat" in method else engine.encode(PROMPT)
    (event,) = counter.llm_token_counts
    assert (event.prompt_token_count, event.completion_token_count) == (len(prompt), 4)
    assert event.total_token_count == counter.total_llm_token_count == len(prompt) + 4


def test_settings_are_options_of_constructor_and_call(llm: CocoaLLM, engine: CocoaEngine, heard: Listener) -> None:
    assert CocoaLLM.model_fields.keys() >= CocoaConfig.model_fields.keys()
    short: dict[str, Any] = {"max_new_tokens": 2, "method": "sample", "top_k": 5, "temperature": 0.5, "seed": 7}
    llm.complete(PROMPT, **short)
    CocoaLLM(engine=engine, **short).complete(PROMPT)
    assert [event.generation.config for event in heard.of(CocoaRiskEvent)] == [engine.config.replace(**short)] * 2
    assert config_of(llm) == engine.config.replace(max_new_tokens=8)


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


def test_stop_texts_are_cut_off(llm: CocoaLLM, engine: CocoaEngine) -> None:
    text = llm.complete(PROMPT).text
    stopping = CocoaLLM(engine=engine, max_new_tokens=8, generate_kwargs={"stop_strings": text[3:6]})
    for response in (llm.complete(PROMPT, stop=[text[3:6]]), stopping.complete(PROMPT)):
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
