"""Completions and chats: what a response holds, what reaches the decoder, and async calls that never block or go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.generic_utils import messages_to_prompt as llama_index_default
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import LLM, ChatMessage, CustomLLM, MessageRole
from llama_index.core.llms.function_calling import FunctionCallingLLM

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, PromptError
from cocoa_integrations._shared.settings import config_of
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent
from tests.helpers.alike import near
from tests.helpers.llama_index_helpers import PROMPT, Listener
from tests.helpers.processors import Asks
from tests.helpers.reports import all_spans, risk_report

QUESTION = [ChatMessage("Name a colour.")]
AS_DICTS = [{"role": "user", "content": "Name a colour."}]
ENDLESS = {"max_new_tokens": 400, "method": "greedy", "suppress_tokens": [0, 2]}  # no end-of-text token
METHODS: dict[str, tuple[str, Any]] = {
    "acomplete": ("complete", PROMPT),
    "astream_complete": ("stream_complete", PROMPT),
    "achat": ("chat", QUESTION),
    "astream_chat": ("stream_chat", QUESTION),
}


def text_of(response: Any) -> str:
    return str(response.message.content if hasattr(response, "message") else response.text)


@pytest.mark.parametrize("method", ["complete", "chat"])
def test_an_answer_is_the_engines_and_its_stream_each_span_then_the_whole_report(
    method: str, llm: CocoaLLM, engine: CocoaEngine
) -> None:
    if method == "chat":
        expected = engine.chat(AS_DICTS, max_new_tokens=8)
    else:
        expected = engine.generate(PROMPT, max_new_tokens=8)
    asked = QUESTION if method == "chat" else PROMPT
    whole = getattr(llm, method)(asked)
    report, spans = risk_report(expected), all_spans(expected)
    assert (text_of(whole), whole.delta) == (expected.text, None)
    assert method == "complete" or whole.message.role is MessageRole.ASSISTANT
    assert whole.additional_kwargs == {"cocoa_spans": spans, "cocoa_risk": report}
    assert (whole.raw["cocoa_risk"], whole.raw["finish_reason"]) == (report, "length")
    assert whole.raw["model"] == whole.raw["model_name"] == engine.model_name
    assert whole.raw["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    log_probs = [log_prob for span in expected.spans for log_prob in span.token_log_probs]
    assert [entry.logprob for (entry,) in whole.logprobs] == near(log_probs)
    assert "".join(entry.token for (entry,) in whole.logprobs) == expected.text
    assert bytes(byte for (entry,) in whole.logprobs for byte in entry.bytes).decode() == expected.text
    *chunks, last = getattr(llm, f"stream_{method}")(asked)
    assert len(chunks) == len(spans) > 1
    text = ""
    for chunk, span in zip(chunks, spans, strict=True):
        text += chunk.delta or ""
        assert text_of(chunk) == text
        assert chunk.additional_kwargs["cocoa_spans"] == [span]
        assert expected.text[span["start"] : span["end"]] == span["text"] == chunk.delta
        assert chunk.raw == {"cocoa_spans": [span]}
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == whole.logprobs
    assert last == whole.model_copy(update={"delta": "", "additional_kwargs": {"cocoa_risk": report}})


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


def test_system_prompt_opens_a_chat_that_has_none(engine: CocoaEngine) -> None:
    llm = CocoaLLM(engine=engine, max_new_tokens=4, system_prompt="Answer in capitals.")
    own = ChatMessage("Answer in French.", role=MessageRole.SYSTEM)

    def expected(system: str) -> str:
        return engine.chat([{"role": "system", "content": system}, *AS_DICTS], max_new_tokens=4).text

    assert llm.chat(QUESTION).message.content == expected("Answer in capitals.")
    assert llm.chat([own, *QUESTION]).message.content == expected("Answer in French.")


def test_every_role_of_llama_index_has_one_in_the_template(
    llm: CocoaLLM, engine: CocoaEngine, prompts: list[str]
) -> None:
    roles = [MessageRole.DEVELOPER, MessageRole.USER, MessageRole.MODEL, MessageRole.USER]
    llm.chat([ChatMessage("Hi.", role=role) for role in roles], max_new_tokens=1)
    known = [{"role": role, "content": "Hi."} for role in ("system", "user", "assistant", "user")]
    assert prompts == [engine.render_chat(known)]


@pytest.mark.parametrize("messages", [[], [ChatMessage("")], [ChatMessage(" \n\t")], [ChatMessage(blocks=[])] * 2])
def test_messages_without_text_are_refused(messages: list[ChatMessage], llm: CocoaLLM, engine: CocoaEngine) -> None:
    opened = CocoaLLM(engine=engine, system_prompt="Be brief.", max_new_tokens=1)
    formatted = CocoaLLM(engine=engine, messages_to_prompt=llama_index_default, max_new_tokens=1)
    for one in (llm, opened, formatted):
        with pytest.raises(PromptError, match="the conversation is empty"):
            one.chat(messages)
    assert opened.chat([ChatMessage("Hi"), *messages]).message.content


async def _two_turns(how: str, chat: SimpleChatEngine) -> list[str]:
    answers = []
    for question in ("Name a colour.", "And another."):
        if how == "chat":
            answers.append((await asyncio.to_thread(chat.chat, question)).response)
        elif how == "stream_chat":
            stream = await asyncio.to_thread(chat.stream_chat, question)
            answers.append("".join(await asyncio.to_thread(list, stream.response_gen)))
        elif how == "achat":
            answers.append((await chat.achat(question)).response)
        else:
            astream = await chat.astream_chat(question)
            answers.append("".join([delta async for delta in astream.async_response_gen()]))
    return answers


@pytest.mark.parametrize("how", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_risk_does_not_leak_into_the_second_turn(how: str, engine: CocoaEngine) -> None:
    prompts: list[str] = []

    def prints_everything(messages: Sequence[ChatMessage]) -> str:
        prompts.append(llama_index_default(messages))  # LlamaIndex's own prints a message's additional_kwargs
        return prompts[-1]

    llm = CocoaLLM(engine=engine, max_new_tokens=6, messages_to_prompt=prints_everything)
    chat = SimpleChatEngine.from_defaults(llm=llm)
    first, _ = await _two_turns(how, chat)
    assert prompts[1] == f"user: Name a colour.\nassistant: {first}\nuser: And another.\nassistant: "
    assert all(not message.additional_kwargs for message in chat.chat_history)


async def _everything(answer: Awaitable[Any]) -> Any:
    """The response, or the list of a stream's responses."""
    answer = await answer
    return [chunk async for chunk in answer] if isinstance(answer, AsyncIterator) else answer


@pytest.mark.parametrize("method", METHODS)
async def test_async_answers_equal_the_sync_ones(method: str, llm: CocoaLLM, heard: Listener) -> None:
    sync, prompt = METHODS[method]
    expected = getattr(llm, sync)(prompt)
    expected = list(expected) if "stream" in method else expected
    assert await _everything(getattr(llm, method)(prompt)) == expected
    assert len(heard.of(CocoaRiskEvent)) == 2


@pytest.mark.parametrize("method", METHODS)
async def test_bad_input_raises_when_asked(method: str, llm: CocoaLLM) -> None:
    with pytest.raises(ConfigError, match="unknown option 'alhpa'"):
        await getattr(llm, method)(METHODS[method][1], alhpa=1.0)
    too_long = "word " * 9000
    with pytest.raises(PromptError, match="8192"):
        await getattr(llm, method)([ChatMessage(too_long)] if "chat" in method else too_long)


async def _assert_stopped(llm: CocoaLLM, calls: list[Any]) -> None:
    """After one further answer, and after another one."""
    await llm.acomplete(PROMPT)
    now = len(calls)
    await llm.acomplete(PROMPT)
    assert len(calls) == now < 100


@pytest.mark.parametrize("method", METHODS)
async def test_cancelling_stops_the_work_within_a_span(method: str, llm: CocoaLLM, heard: Listener) -> None:
    calls: list[Any] = []
    call = getattr(llm, method)(
        METHODS[method][1], **ENDLESS, gamma=1.0, logits_processor=Asks(calls.append)
    )  # one long span
    task = asyncio.ensure_future(_everything(call))
    while len(calls) < 3 and not task.done():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _assert_stopped(llm, calls)
    assert not [event for event in heard.of(CocoaRiskEvent) if event.generation.usage.completion_tokens > 8]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_leaving_a_stream_stops_the_work(asynchronous: bool, llm: CocoaLLM) -> None:
    calls: list[Any] = []
    if asynchronous:
        stream: Any = await llm.astream_complete(PROMPT, **ENDLESS, logits_processor=Asks(calls.append))
        await anext(stream)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
    else:
        stream = llm.stream_complete(PROMPT, **ENDLESS, logits_processor=Asks(calls.append))
        next(stream)
        stream.close()
    await _assert_stopped(llm, calls)
