"""Chat and text models: messages, answers, streams, usage, options of a call, async; the detail of what they carry."""

import asyncio
import json
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumps, loads
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
    trim_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import Generation
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.utils import add as added

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, HallucinationRiskError, PromptError
from cocoa_integrations.chat_service import local
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    GenerationTimeoutError,
    RiskMiddleware,
    RiskOutputParser,
    get_risk,
    get_spans,
    max_risk,
    risk_gate,
)
from cocoa_integrations.langchain.messages import to_chat, to_entries
from tests.helpers.alike import close, risk_report, to_dicts, token_counts, without_reuse
from tests.helpers.inside import failing
from tests.helpers.reasoning_models import PLAIN, reasoning_engine, saying
from tests.helpers.tiny_models import QUESTION

PROMPTS = ["The capital of France is", "One, two, three,", "Once upon a time"]
each_kind = pytest.mark.parametrize("kind", [ChatCocoa, CocoaLLM])


def only(model: Any, prompt: str, **options: Any) -> Generation:
    """What a call generates."""
    asked = [model._convert_input(prompt)]
    return model.generate_prompt(asked, **{"risk_metadata": "full", **options}).generations[0][0]


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text


def test_an_answer_and_its_usage_are_those_of_the_engines_chat(
    engine: CocoaEngine, chat: ChatCocoa, answer: AIMessage
) -> None:
    asked = [{"role": "user", "content": QUESTION}]
    expected, prompt = engine.chat(asked, max_new_tokens=12), len(engine.encode_chat(asked))
    assert answer.content == expected.text  # the chat template is used and the prompt is not echoed
    assert get_risk(answer).to_dict() == risk_report(expected)
    assert answer.response_metadata["finish_reason"] == expected.finish_reason == "length"
    assert answer.response_metadata["model_name"] == engine.model_name
    counts = {"input_tokens": prompt, "output_tokens": 12, "total_tokens": prompt + 12}
    assert token_counts(answer.usage_metadata) == counts
    assert chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) == prompt
    text = "naïve café 🙂"
    assert chat.get_token_ids(text) == engine.encode(text, add_special_tokens=False)
    assert ChatCocoa(engine=engine, custom_get_token_ids=lambda text: [1, 2]).get_num_tokens(text) == 2


def test_each_chunk_is_one_span_the_last_is_the_report_and_they_add_up(chat: ChatCocoa, answer: AIMessage) -> None:
    chunks = list(chat.stream(QUESTION))
    (*parts, last), whole = chunks, added(chunks)
    spans = get_risk(answer).to_dict()["spans"]
    assert len(parts) > 2
    assert [to_dicts(get_spans(chunk)) for chunk in parts] == [[span] for span in spans]
    assert [chunk.content for chunk in parts] == [span["text"] for span in spans]
    assert all(not chunk.response_metadata and chunk.usage_metadata is None for chunk in parts)
    assert (last.content, last.chunk_position) == ("", "last")
    assert get_risk(last).to_dict() == get_risk(answer).to_dict()
    assert (whole.content, whole.additional_kwargs) == (answer.content, answer.additional_kwargs)
    assert whole.response_metadata == answer.response_metadata
    assert token_counts(whole.usage_metadata) == token_counts(answer.usage_metadata)
    for message in (answer, whole):
        assert message.response_metadata["model_provider"] == "cocoa"
        assert message.content_blocks == [{"type": "text", "text": message.text}]


@each_kind
def test_stop_texts_of_the_model_and_of_a_call(kind: Any, quick_engine: CocoaEngine) -> None:
    options: dict[str, Any] = {"engine": quick_engine, "max_tokens": 12, "span_log_prob": "sum"}  # ends may be kept
    model = kind(**options)
    text = model.generate_prompt([model._convert_input(PROMPTS[0])]).generations[0][0].text
    first, second = text[3:5], text[6:8]
    stopping = kind(**options, stop=[first])
    for asked, stop, expected in (
        (stopping, {}, text.split(first)[0]),
        (stopping, {"stop": [second]}, text.split(second)[0]),
        (stopping, {"stop": []}, text),
        (model, {"stop": [first]}, text.split(first)[0]),
    ):
        answer = only(asked, PROMPTS[0], **stop)
        assert answer.text == expected
        stops = answer.generation_info if kind is CocoaLLM else answer.message.response_metadata
        assert (stops["finish_reason"] == "stop") == (expected != text)
        assert to_dicts(get_spans(answer))[-1]["end"] == len(expected)
        answers = [asked.invoke(PROMPTS[0], **stop), asked.bind(**stop).invoke(PROMPTS[0])]
        answers += [*asked.batch(PROMPTS[:1], **stop), added(list(asked.stream(PROMPTS[0], **stop)))]
        assert {text_of(one) for one in answers} == {expected}


@each_kind
def test_settings_of_a_call_apply_and_do_not_stay(kind: Any, quick_engine: CocoaEngine) -> None:
    model = kind(engine=quick_engine, max_tokens=12)
    options: dict[str, Any] = {"alpha": 0.5, "max_tokens": 3}
    first, other = to_dicts(get_spans(only(model, PROMPTS[0])))[0], only(model, PROMPTS[0], **options)
    of_other = to_dicts(get_spans(other))[0]
    assert of_other["score"] == pytest.approx(of_other["log_prob"] * (1 + 0.5 * of_other["f_mlds"])) != first["score"]
    answers = [model.bind(**options).invoke(PROMPTS[0]), added(list(model.stream(PROMPTS[0], **options)))]
    answers += [model.batch(PROMPTS[:2], **options)[0], model.invoke(PROMPTS[0], alpha=0.5, max_new_tokens=3)]
    assert {text_of(one) for one in answers} == {other.text}
    report = get_risk(only(model, PROMPTS[0], method="greedy", max_tokens=2))
    assert (report.method, model.alpha) == ("greedy", 2.5)
    assert to_dicts(get_spans(only(model, PROMPTS[0])))[0] == first


async def test_batches_and_async_calls_answer_as_single_ones(quick_chat: ChatCocoa, quick_answer: AIMessage) -> None:
    async def streamed() -> Any:
        return added([chunk async for chunk in quick_chat.astream(QUESTION)])

    questions = ["Name a colour.", QUESTION, "What is 2 + 2?", "Say hello.", QUESTION]
    answers = quick_chat.batch(questions, max_tokens=12)
    assert len({message.content for message in answers}) == 4
    same, whole, pair = await asyncio.gather(
        quick_chat.ainvoke(QUESTION), streamed(), quick_chat.abatch([QUESTION, QUESTION])
    )
    for message in (same, whole, *pair, answers[1], answers[4]):
        assert message.content == quick_answer.content
        assert close(get_risk(message).to_dict(), get_risk(quick_answer).to_dict())


def test_text_streams_with_the_risk_beside_it(chat: ChatCocoa, answer: AIMessage) -> None:
    chain = (
        ChatPromptTemplate.from_messages([("human", "{question}")])
        | chat
        | RunnableParallel(text=StrOutputParser(), risk=RunnableLambda(get_risk))
    )
    result = chain.invoke({"question": QUESTION})
    assert result == {"text": answer.content, "risk": get_risk(answer)}
    assert (chain | risk_gate(1.0)).invoke({"question": QUESTION}) == result
    abstained = (chain | risk_gate(0.0, on_risk="abstain", answer="?")).invoke({"question": QUESTION})
    assert (abstained["text"], get_risk(abstained).max_risk) == ("?", get_risk(answer).max_risk)
    pieces = [piece for piece in chain.stream({"question": QUESTION}) if piece.get("text")]
    assert len(pieces) > 2
    assert "".join(piece["text"] for piece in pieces) == answer.content


def test_risk_metadata_never_reaches_a_later_prompt(
    quick_engine: CocoaEngine, quick_chat: ChatCocoa, quick_answer: AIMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mock(wraps=quick_engine.chat)
    monkeypatch.setattr(quick_engine, "chat", asked)
    conversation = [SystemMessage("Be brief."), HumanMessage(QUESTION), quick_answer, HumanMessage("And the radio?")]
    quick_chat.invoke(conversation, max_tokens=1)
    [((messages,), _)] = asked.call_args_list
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": quick_answer.content},
        {"role": "user", "content": "And the radio?"},
    ]
    assert "cocoa" not in quick_engine.render_chat(messages)


def test_messages_are_trimmed_by_the_models_own_count(quick_chat: ChatCocoa) -> None:
    messages = [HumanMessage("One?"), AIMessage("1"), HumanMessage("Two?"), AIMessage(""), HumanMessage("Three?")]
    limit = quick_chat.get_num_tokens_from_messages(messages[2:])
    kept = trim_messages(messages, max_tokens=limit, token_counter=quick_chat, strategy="last", start_on="human")
    assert kept == messages[2:]
    assert trim_messages(messages, max_tokens=1, token_counter=quick_chat) == []
    assert quick_chat.get_num_tokens_from_messages([]) == 0


def test_a_timeout_raises_so_that_fallbacks_start(quick_engine: CocoaEngine, quick_chat: ChatCocoa) -> None:
    hasty = ChatCocoa(engine=quick_engine, max_tokens=12, timeout=1e-6)
    with pytest.raises(GenerationTimeoutError, match="within 1e-06 s"):
        hasty.invoke(QUESTION)
    with pytest.raises(TimeoutError):
        list(quick_chat.stream(QUESTION, timeout=1e-6))
    assert hasty.with_fallbacks([quick_chat]).invoke(QUESTION).content
    assert hasty.invoke(QUESTION, timeout=600.0).content


def test_running_out_of_gpu_memory_is_tried_again(
    quick_engine: CocoaEngine,
    quick_chat: ChatCocoa,
    monkeypatch: pytest.MonkeyPatch,
    quick_answer: AIMessage,
) -> None:
    monkeypatch.setattr(local, "RETRY_PAUSE", 0.0)
    error = torch.OutOfMemoryError("CUDA out of memory")
    whole, streamed = (Mock(wraps=each) for each in (quick_engine.chat, quick_engine.stream_chat))
    monkeypatch.setattr(quick_engine, "chat", whole)
    monkeypatch.setattr(quick_engine, "stream_chat", streamed)
    whole.side_effect = streamed.side_effect = [error, error, DEFAULT]
    assert quick_chat.invoke(QUESTION).content == quick_answer.content
    assert (whole.call_count, streamed.call_count) == (3, 0)
    assert added(list(quick_chat.stream(QUESTION))).content == quick_answer.content
    assert (whole.call_count, streamed.call_count) == (3, 3)
    whole.side_effect = [error, error, DEFAULT]
    with pytest.raises(torch.OutOfMemoryError):
        ChatCocoa(engine=quick_engine, max_tokens=12, max_retries=1).invoke(QUESTION)


@each_kind
def test_invoke_hands_spans_to_callbacks_when_streaming_is_on(kind: Any, quick_engine: CocoaEngine, live: Any) -> None:
    answer, expected = (
        only(kind(engine=quick_engine, max_tokens=12, **options), QUESTION, callbacks=options and [live])
        for options in ({"streaming": True}, {})
    )
    assert answer.text == expected.text
    if kind is CocoaLLM:
        assert without_reuse(answer.generation_info) == without_reuse(expected.generation_info)
    assert get_risk(answer).to_dict() == get_risk(expected).to_dict()
    assert live.spans == to_dicts(get_spans(answer)) == to_dicts(get_spans(expected))
    assert "".join(live.tokens) == expected.text
    assert len(list(ChatCocoa(engine=quick_engine, max_tokens=12, streaming=False).stream(QUESTION))) == 1


def test_a_stream_that_began_is_not_begun_again(
    quick_engine: CocoaEngine, quick_chat: ChatCocoa, monkeypatch: pytest.MonkeyPatch, spy: Any
) -> None:
    monkeypatch.setattr(local, "RETRY_PAUSE", 0.0)
    stream = quick_chat.stream(QUESTION)
    next(stream)
    error = torch.OutOfMemoryError("CUDA out of memory")
    with failing(quick_engine, error), pytest.raises(torch.OutOfMemoryError):
        list(stream)
    assert spy.stream.call_count == 1


def test_stream_usage_leaves_the_usage_out(quick_engine: CocoaEngine) -> None:
    chat, silent = (ChatCocoa(engine=quick_engine, max_tokens=3, stream_usage=usage) for usage in (None, False))
    for model, options, told in (
        (chat, {}, True),
        (chat, {"stream_usage": False}, False),
        (chat.bind(stream_usage=False), {}, False),
        (silent, {}, False),
        (silent, {"stream_usage": True}, True),
    ):
        assert any(chunk.usage_metadata for chunk in model.stream("Hi", **options)) == told
    assert silent.invoke("Hi").usage_metadata is not None
    assert silent._identifying_params != chat._identifying_params
    assert ChatCocoa(stream_usage=None) == ChatCocoa()
    with pytest.raises(ConfigError, match="stream_usage"):
        chat.invoke("Hi", stream_usage="perhaps")
    llm = CocoaLLM(engine=quick_engine, max_tokens=3, streaming=True)
    [quiet], [loud] = (llm.generate(["Hi"], stream_usage=usage).generations[0] for usage in (False, True))
    assert "usage_metadata" not in quiet.generation_info
    assert loud.generation_info["usage_metadata"]["output_tokens"] == 3
    assert "".join(llm.stream("Hi", stream_usage=False)) == "".join(llm.stream("Hi"))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (SystemMessage("a"), {"role": "system", "content": "a"}),
        (HumanMessage("a"), {"role": "user", "content": "a"}),
        (HumanMessage("a", name="Ada"), {"role": "user", "content": "a", "name": "Ada"}),
        (AIMessage("a"), {"role": "assistant", "content": "a"}),
        (AIMessageChunk("a"), {"role": "assistant", "content": "a"}),
        (ChatMessage("a", role="developer"), {"role": "system", "content": "a"}),
        (HumanMessage(["a", {"type": "text", "text": "b"}]), {"role": "user", "content": "ab"}),
    ],
)
def test_known_messages(message: BaseMessage, expected: dict[str, str]) -> None:
    assert to_chat([message]) == [expected]


def test_the_name_of_a_call_is_that_of_its_result() -> None:
    call = {"name": "f", "args": {}}
    calls = AIMessage("", tool_calls=[{**call, "id": None}, {**call, "id": "1"}])
    entries = to_entries([HumanMessage("a"), calls, ToolMessage("b", tool_call_id="1"), HumanMessage("c")])
    assert [entry.get("name") for entry in entries] == [None, None, "f", None]
    with pytest.raises(PromptError, match="cannot hold messages of type FunctionMessage"):
        to_chat([HumanMessage("Hi"), FunctionMessage("a", name="f")])


async def test_every_way_returns_the_same_text(quick_llm: CocoaLLM, spy: Any, live: Any) -> None:
    texts = quick_llm.batch(PROMPTS)
    assert [(name, args) for name, args, _ in spy.method_calls] == [("generate_batch", (PROMPTS,))]
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


def test_usage_is_counted_for_a_batch(quick_engine: CocoaEngine, quick_llm: CocoaLLM) -> None:
    result = quick_llm.generate(PROMPTS)
    usage = [answer.generation_info["usage_metadata"] for [answer] in result.generations]
    assert [one["input_tokens"] for one in usage] == [len(quick_engine.encode(prompt)) for prompt in PROMPTS]
    counts = [sum(one[f"{name}_tokens"] for one in usage) for name in ("input", "output", "total")]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert result.llm_output["token_usage"] == dict(zip(names, counts, strict=True))


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


COMPACT = {"start", "end", "kind", "con_mlds", "f_mlds", "log_prob", "risk", "source_attention"}


@pytest.fixture(scope="module")
def compact_chat(quick_engine: CocoaEngine) -> ChatCocoa:
    """A model with the defaults."""
    return ChatCocoa(engine=quick_engine, max_tokens=12)


@pytest.fixture(scope="module")
def compact(compact_chat: ChatCocoa) -> AIMessage:
    return compact_chat.invoke(QUESTION)


def test_a_message_of_invoke_says_nothing_twice(compact: AIMessage, quick_answer: AIMessage) -> None:
    assert compact.additional_kwargs == {}
    assert set(compact.response_metadata) >= {"cocoa_risk", "model_name", "finish_reason"}
    assert "logprobs" not in compact.response_metadata
    spans = compact.response_metadata["cocoa_risk"]["spans"]
    for span in spans:
        expected = COMPACT | ({"candidates"} if span["kind"] == "risk_point" else set())
        assert set(span) == expected | (set() if compact.text[span["start"] : span["end"]].strip() else {"text"})
    assert len(compact.model_dump_json()) < len(quick_answer.model_dump_json()) / 2


async def test_every_entry_point_has_its_default(
    compact_chat: ChatCocoa, compact: AIMessage, quick_answer: AIMessage
) -> None:
    messages = [
        compact_chat.batch([QUESTION])[0],
        await compact_chat.ainvoke(QUESTION),
        compact_chat.invoke(QUESTION, stream=True),
        compact_chat.generate(messages=[[HumanMessage(QUESTION)]]).generations[0][0].message,
    ]
    for message in messages:
        assert (message.additional_kwargs, message.response_metadata) == ({}, compact.response_metadata)
    chunks = [list(compact_chat.stream(QUESTION)), [chunk async for chunk in compact_chat.astream(QUESTION)]]
    for streamed in chunks:
        assert [span for chunk in streamed for span in to_dicts(get_spans(chunk))] == to_dicts(get_spans(quick_answer))
        assert streamed[-1].response_metadata == quick_answer.response_metadata


def test_a_call_and_a_model_choose_the_detail(quick_engine: CocoaEngine, quick_answer: AIMessage) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, risk_metadata="none")
    silent = chat.invoke(QUESTION)
    assert set(silent.response_metadata) == {"model_name", "finish_reason", *silent.response_metadata} - {"cocoa_risk"}
    assert silent.additional_kwargs == {}
    with pytest.raises(ConfigError, match="risk_metadata='none'"):
        get_risk(silent).to_dict()
    assert to_dicts(get_spans(silent)) == []
    whole = chat.invoke(QUESTION, risk_metadata="full")
    assert (whole.additional_kwargs, whole.response_metadata) == (
        quick_answer.additional_kwargs,
        quick_answer.response_metadata,
    )
    assert chat.bind(risk_metadata="compact").invoke(QUESTION).response_metadata["cocoa_risk"]["compact"] is True
    assert all(
        not chunk.additional_kwargs and "cocoa_risk" not in chunk.response_metadata for chunk in chat.stream("a")
    )
    with pytest.raises(ConfigError, match="risk_metadata"):
        chat.invoke(QUESTION, risk_metadata="some")
    chat.risk_metadata = "some"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="risk_metadata"):
        list(chat.stream(QUESTION))


def test_a_compact_stream_adds_up_to_the_message(compact_chat: ChatCocoa, compact: AIMessage) -> None:
    whole = added(list(compact_chat.stream(QUESTION, risk_metadata="compact")))
    assert (whole.text, whole.additional_kwargs) == (compact.text, {})
    assert whole.response_metadata == compact.response_metadata
    with pytest.raises(HallucinationRiskError):
        list((compact_chat.bind(risk_metadata="compact") | risk_gate(0.0)).stream(QUESTION))


def test_log_probabilities_stay_where_they_were_asked_for(compact_chat: ChatCocoa, quick_answer: AIMessage) -> None:
    asked = compact_chat.invoke(QUESTION, logprobs=True)
    assert asked.response_metadata["logprobs"] == quick_answer.response_metadata["logprobs"]
    assert asked.response_metadata["cocoa_risk"]["compact"] is True
    chat = compact_chat.model_copy(update={"logprobs": False})
    for options in ({}, {"logprobs": False}, {"logprobs": False, "risk_metadata": "full"}):
        assert "logprobs" not in chat.invoke(QUESTION, **options).response_metadata
        chat.logprobs = True  # as scorers switch them on
    assert chat.invoke(QUESTION).response_metadata["logprobs"]["content"]


def test_an_agent_keeps_compact_messages_and_no_second_copy(compact_chat: ChatCocoa) -> None:
    for streamed in (False, True):
        agent = create_agent(compact_chat, tools=[], middleware=[RiskMiddleware(0.0)])
        asked = {"messages": [("user", QUESTION)]}
        state = (
            list(agent.stream(asked, stream_mode=["values", "messages"]))[-1][1] if streamed else agent.invoke(asked)
        )
        message, [entry] = state["messages"][-1], state["cocoa_risks"]
        assert message.additional_kwargs == {}
        assert message.response_metadata["cocoa_risk"]["compact"] is True
        assert "logprobs" not in message.response_metadata
        assert entry["report"]["max_risk"] == get_risk(message).max_risk
        assert "spans" not in entry["report"]
        assert entry["value"] == max_risk(message)


def test_a_cached_answer_has_the_detail_of_its_call(quick_engine: CocoaEngine) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, cache=InMemoryCache())
    chat.invoke(QUESTION, risk_metadata="none")
    assert chat.invoke(QUESTION).response_metadata["cocoa_risk"]["compact"] is True
    assert len(chat.cache._cache) == 1
    assert chat.invoke(QUESTION, risk_metadata="full").additional_kwargs["cocoa_spans"]


def test_a_text_model_has_full_metadata_unless_asked(quick_engine: CocoaEngine) -> None:
    llm = CocoaLLM(engine=quick_engine, max_tokens=12)
    [[full]] = llm.generate(["Once"]).generations
    assert {"cocoa_spans", "cocoa_risk", "logprobs"} <= full.generation_info.keys()
    [[small]] = llm.generate(["Once"], risk_metadata="compact").generations
    assert "cocoa_spans" not in small.generation_info
    for ours, theirs in zip(to_dicts(get_spans(small)), to_dicts(get_spans(full)), strict=True):
        assert {**theirs, **ours} == theirs
    [[silent]] = llm.generate(["Once"], risk_metadata="none").generations
    assert "cocoa_risk" not in silent.generation_info


@pytest.mark.parametrize("text", ["Hello!", "<think>It is a greeting.</think>\n\nHello!"])
async def test_a_parsed_compact_stream_has_the_texts_of_its_spans(text: str) -> None:
    engine = reasoning_engine(PLAIN)
    chat = ChatCocoa(engine=engine, risk_metadata="compact", **saying(engine, text))
    expected = (chat | RiskOutputParser()).invoke("Hi")
    chain = chat | RiskOutputParser()
    for chunks in (list(chain.stream("Hi")), [chunk async for chunk in chain.astream("Hi")]):
        assert len(chunks) > 2
        assert chunks[-1]["risk"] == expected["risk"]
        assert "".join(span["text"] for span in chunks[-1]["risk"]["spans"]) == text


@pytest.mark.parametrize("unstreamed", [{"streaming": False}, {"disable_streaming": True}])
async def test_a_stream_in_one_piece_has_the_detail_of_streams(
    quick_engine: CocoaEngine, quick_answer: AIMessage, unstreamed: dict[str, Any]
) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, **unstreamed)
    for [chunk] in (list(chat.stream(QUESTION)), [chunk async for chunk in chat.astream(QUESTION)]):
        assert chunk.response_metadata == quick_answer.response_metadata
        assert chunk.additional_kwargs == quick_answer.additional_kwargs
    [small] = chat.stream(QUESTION, risk_metadata="compact")
    assert (small.additional_kwargs, small.response_metadata) == ({}, chat.invoke(QUESTION).response_metadata)
    [silent] = chat.bind(risk_metadata="none").stream(QUESTION)
    assert "cocoa_risk" not in silent.response_metadata


@pytest.mark.filterwarnings("ignore:The method .*stream_v3")
@pytest.mark.parametrize("detail", ["full", "none"])
def test_v3_events_are_always_full(compact_chat: ChatCocoa, quick_answer: AIMessage, live: Any, detail: Any) -> None:
    asked = {"version": "v3", "risk_metadata": detail, "config": {"callbacks": [live]}}
    stream = compact_chat.stream_events(QUESTION, **asked)
    finish, spans = list(stream)[-1], to_dicts(get_spans(quick_answer))
    assert finish["metadata"]["cocoa_risk"] == get_risk(quick_answer).to_dict()
    assert finish["additional_kwargs"]["cocoa_spans"] == spans
    assert get_risk(stream.output).to_dict() == get_risk(quick_answer).to_dict()
    assert to_dicts(get_spans(stream.output)) == live.spans == spans


async def test_with_risk_is_full_whatever_the_detail(quick_engine: CocoaEngine) -> None:
    expected = CocoaLLM(engine=quick_engine, max_tokens=12).with_risk().invoke("Once")
    for detail in (None, "full", "compact", "none"):
        model = CocoaLLM(engine=quick_engine, max_tokens=12, risk_metadata=detail).with_risk()
        assert model.invoke("Once") == expected
    for detail in ("compact", "none"):
        assert model.invoke("Once", risk_metadata=detail) == expected
        assert await model.ainvoke("Once", risk_metadata=detail) == expected
        assert list(model.stream("Once", risk_metadata=detail))[-1]["risk"] == expected["risk"]
        assert [one async for one in model.astream("Once", risk_metadata=detail)][-1]["risk"] == expected["risk"]
    with pytest.raises(ConfigError, match="risk_metadata"):
        model.invoke("Once", risk_metadata="some")


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_it_is_plain_json_and_survives_being_stored(answer: AIMessage, quick_llm: CocoaLLM) -> None:
    [[generation]] = quick_llm.generate(["Once"]).generations
    for metadata in (answer.response_metadata, answer.additional_kwargs, generation.generation_info):
        assert json.loads(json.dumps(metadata, allow_nan=False)) == metadata
    names = {"cocoa_spans", "cocoa_risk", "model_name", "finish_reason", "logprobs", "usage_metadata"}
    assert set(generation.generation_info) == names
    assert AIMessage.model_validate_json(answer.model_dump_json()) == answer
    assert loads(dumps(answer), allowed_objects="messages") == answer
    assert messages_from_dict(messages_to_dict([answer])) == [answer]


async def test_v2_events_carry_spans_live_and_the_report_at_the_end(
    quick_chat: ChatCocoa, quick_answer: AIMessage
) -> None:
    async def nested(text: str) -> str:
        return (await quick_chat.ainvoke(text)).content  # an ordinary call inside a chain streams its events too

    for runnable in (quick_chat, RunnableLambda(nested)):
        events = [event async for event in runnable.astream_events(QUESTION, version="v2")]
        chunks = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
        [end] = [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]
        assert [span for chunk in chunks for span in to_dicts(get_spans(chunk))] == to_dicts(get_spans(quick_answer))
        assert get_risk(chunks[-1]).to_dict() == get_risk(end).to_dict() == get_risk(quick_answer).to_dict()
        assert to_dicts(get_spans(end)) == to_dicts(get_spans(quick_answer))
