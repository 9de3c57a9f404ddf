"""Completions and chats: what a response holds, what reaches the decoder, events, collectors, and async calls."""

import asyncio
import contextvars
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.generic_utils import messages_to_prompt as llama_index_default
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms import LLM, ChatMessage, CustomLLM, MessageRole
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.types import Thread

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, PromptError
from cocoa_engine.report import RISK_KEY
from cocoa_integrations._shared.options import config_of
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent, CocoaSpanEvent, RiskScores, collect_risk
from tests.helpers.alike import all_spans, near, risk_report, to_dicts, without_run
from tests.helpers.in_threads import join, start
from tests.helpers.llama_index_helpers import PROMPT, Listener, answered
from tests.helpers.span_handlers import Events, Spans

QUESTION = [ChatMessage("Name a colour.")]
AS_DICTS = [{"role": "user", "content": "Name a colour."}]
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


@pytest.mark.parametrize("prompt", [None, 3, b"Hi", ["Hi"], ChatMessage("Hi")])
def test_a_prompt_that_is_no_text_is_refused(prompt: Any, llm: CocoaLLM, engine: CocoaEngine) -> None:
    for ask in (llm.complete, llm.stream_complete, engine.encode):
        with pytest.raises(PromptError, match=f"must be a str, not {type(prompt).__name__}"):
            ask(prompt)


@pytest.mark.parametrize("how", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_risk_does_not_leak_into_the_second_turn(how: str, engine: CocoaEngine) -> None:
    prompts: list[str] = []

    def prints_everything(messages: Sequence[ChatMessage]) -> str:
        prompts.append(llama_index_default(messages))  # LlamaIndex's own prints a message's additional_kwargs
        return prompts[-1]

    llm = CocoaLLM(engine=engine, max_new_tokens=6, messages_to_prompt=prints_everything)
    chat = SimpleChatEngine.from_defaults(llm=llm)
    first, _ = await answered(chat, how, "Name a colour.")
    await answered(chat, how, "And another.")
    assert prompts[1] == f"user: Name a colour.\nassistant: {first}\nuser: And another.\nassistant: "
    assert all(not message.additional_kwargs for message in chat.chat_history)


@pytest.mark.parametrize("method", METHODS)
async def test_async_answers_equal_the_sync_ones(method: str, llm: CocoaLLM, heard: Listener) -> None:
    sync, prompt = METHODS[method]
    expected = getattr(llm, sync)(prompt)
    expected = list(expected) if "stream" in method else expected
    answer = await getattr(llm, method)(prompt)
    assert ([chunk async for chunk in answer] if "stream" in method else answer) == expected
    assert len(heard.of(CocoaRiskEvent)) == 2


@pytest.mark.parametrize("method", METHODS)
async def test_bad_input_raises_when_asked(method: str, llm: CocoaLLM) -> None:
    with pytest.raises(ConfigError, match="unknown option 'alhpa'"):
        await getattr(llm, method)(METHODS[method][1], alhpa=1.0)
    too_long = "word " * 9000
    with pytest.raises(PromptError, match="8192"):
        await getattr(llm, method)([ChatMessage(too_long)] if "chat" in method else too_long)


def test_one_event_a_span_and_one_an_answer(llm: CocoaLLM, heard: Listener) -> None:
    response = llm.complete(PROMPT)
    (risk,) = heard.of(CocoaRiskEvent)
    spans = heard.of(CocoaSpanEvent)
    assert without_run([risk.model_dump()["report"]]) == [risk_report(risk.generation)]
    assert [risk_report(risk.generation)] == [response.additional_kwargs[RISK_KEY]]
    assert risk.report.run_id == risk.span_id
    assert json.loads(risk.model_dump_json())["report"] == risk.report.to_dict()
    assert CocoaRiskEvent.model_validate({"report": risk.report.to_dict(), "generation": None}).report == risk.report
    assert len(spans) > 1
    assert [event.number for event in spans] == list(range(len(risk.generation.spans)))
    assert to_dicts(event.span for event in spans) == all_spans(risk.generation)
    assert {event.span_id for event in spans} == {risk.span_id}
    assert risk.span_id.startswith("CocoaLLM.complete-")
    for event in (risk, *spans):
        assert json.loads(json.dumps(event.model_dump(mode="json")))["class_name"] == type(event).__name__


@pytest.mark.also_remote
def test_span_events_are_live_while_streaming_and_an_abandoned_answer_has_no_risk_event(
    llm: CocoaLLM, heard: Listener
) -> None:
    next(stream := llm.stream_complete(PROMPT))
    stream.close()
    assert len(heard.of(CocoaSpanEvent)) == 1
    assert not heard.of(CocoaRiskEvent)
    heard.events.clear()
    for number, chunk in enumerate(llm.stream_complete(PROMPT), start=1):
        spans, risks = heard.of(CocoaSpanEvent), heard.of(CocoaRiskEvent)
        if RISK_KEY in chunk.additional_kwargs:
            assert len(risks) == 1
        else:
            assert (len(spans), len(risks)) == (number, 0)
            assert spans[-1].span.text == chunk.delta
    assert len({event.span_id for event in heard.of(CocoaSpanEvent, CocoaRiskEvent)}) == 1


@pytest.mark.also_remote
def test_collects_what_is_asked_for_inside_the_block(llm: CocoaLLM) -> None:
    llm.complete(PROMPT)
    with collect_risk() as reports:
        first = llm.complete(PROMPT)
        *_, second = llm.stream_chat(QUESTION)
    llm.complete(PROMPT)
    assert without_run(reports) == [first.additional_kwargs[RISK_KEY], second.additional_kwargs[RISK_KEY]]


def test_a_failed_generation_is_not_reported_and_ends_its_block(llm: CocoaLLM, heard: Listener) -> None:
    def broken(ids: Any, scores: Any) -> Any:
        raise RuntimeError("processor")

    with pytest.raises(RuntimeError, match="processor"), collect_risk() as reports:
        llm.complete(PROMPT, logits_processor=broken)
    llm.complete(PROMPT, max_new_tokens=1)
    assert reports == []
    assert len(heard.of(CocoaRiskEvent)) == 1


def test_blocks_nest_and_keep_the_latest_reports(llm: CocoaLLM) -> None:
    collector = collect_risk(max_reports=1)
    with collect_risk() as outer, collector as latest:
        llm.complete(PROMPT, max_new_tokens=1)
        with collect_risk() as inner:
            llm.complete(PROMPT)
        llm.complete(PROMPT, max_new_tokens=1)
    assert len(outer) == 3
    assert (inner, latest) == ([outer[1]], [outer[2]])
    assert collector.max_risk == max(report.max_risk or 0.0 for report in outer)
    inner[0].spans.clear()
    assert outer[1].spans  # a report of its own
    with pytest.raises(ConfigError, match="max_reports"):
        collect_risk(max_reports=0)


async def test_tasks_do_not_see_each_other(llm: CocoaLLM) -> None:
    async def ask(prompt: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        with collect_risk() as reports:
            response = await llm.acomplete(prompt)
        return reports, response.additional_kwargs[RISK_KEY]

    for reports, own in await asyncio.gather(ask(PROMPT), ask("2 + 2 =")):
        assert without_run(reports) == [own]


def test_follows_llama_index_threads_and_copied_contexts(llm: CocoaLLM) -> None:
    def ask() -> None:
        llm.complete(PROMPT, max_new_tokens=1)

    with collect_risk() as reports:
        bare = threading.Thread(target=ask)
        for thread in (bare, Thread(target=ask), threading.Thread(target=contextvars.copy_context().run, args=(ask,))):
            thread.start()
            join([thread])
    assert len(reports) == 2  # all but the bare one, which starts from an empty context


@pytest.mark.also_remote
def test_an_answer_belongs_to_the_block_that_asked(llm: CocoaLLM) -> None:
    with collect_risk() as asked:
        stream = llm.stream_complete(PROMPT)
    with collect_risk() as read:
        join([start(lambda: list(stream))])
    assert len(asked) == 1
    assert read == []


@pytest.mark.parametrize("method", ["stream_complete", "stream_chat"])
def test_sync_streams_set_no_context_variable(method: str, llm: CocoaLLM, heard: Listener) -> None:
    with collect_risk() as reports:
        stream = getattr(llm, method)(PROMPT if method == "stream_complete" else QUESTION)
        before = dict(contextvars.copy_context().items())
        next(stream)
        after = dict(contextvars.copy_context().items())
        assert {name: value for name, value in after.items() if name not in before or before[name] is not value} == {}
        assert active_span_id.get() is None
        # each ``next`` in a context of its own: whatever a generator sets there is lost, or breaks its reset
        while chunk := contextvars.copy_context().run(next, stream, None):
            last = chunk
    assert without_run(reports) == [last.additional_kwargs[RISK_KEY]]
    assert len(heard.of(CocoaRiskEvent)) == 1


@pytest.mark.also_remote
@pytest.mark.parametrize("streamed", [False, True])
def test_opentelemetry_gets_an_event(llm: CocoaLLM, streamed: bool) -> None:
    events, spans, root = Events(), Spans(), get_dispatcher()
    handler = RiskScores(logger_provider=events.provider, threshold=0.0)
    root.add_event_handler(handler)
    try:
        with spans.tracer.start_as_current_span("outer") as outer:
            chunks = llm.stream_complete(PROMPT) if streamed else [llm.complete(PROMPT)]
        *_, last = chunks
    finally:
        root.event_handlers.remove(handler)
    [event] = events.records()
    assert event.event_name == "gen_ai.evaluation.result"
    assert event.attributes["gen_ai.evaluation.name"] == "hallucination_risk"
    assert event.attributes["gen_ai.evaluation.score.value"] == last.additional_kwargs[RISK_KEY]["max_risk"]
    assert event.attributes["gen_ai.evaluation.score.label"] == "fail"
    assert event.span_id == outer.get_span_context().span_id
