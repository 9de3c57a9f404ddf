"""How much of the risk the messages of each entry point carry, and that LangChain loses none of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, messages_from_dict, messages_to_dict
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.runnables.utils import add

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    RiskMiddleware,
    RiskOutputParser,
    get_risk,
    get_risk_callback,
    get_spans,
    max_risk,
    risk_gate,
)
from tests.helpers.reasoning_models import PLAIN, reasoning_engine, saying
from tests.helpers.reports import to_dicts, without_run

COMPACT = {"start", "end", "kind", "con_mlds", "f_mlds", "log_prob", "risk", "source_attention"}


@pytest.fixture(scope="module")
def compact_chat(quick_engine: CocoaEngine) -> ChatCocoa:
    """A model with the defaults."""
    return ChatCocoa(engine=quick_engine, max_tokens=12)


@pytest.fixture(scope="module")
def compact(compact_chat: ChatCocoa, question: str) -> AIMessage:
    return compact_chat.invoke(question)


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
    compact_chat: ChatCocoa, compact: AIMessage, quick_answer: AIMessage, question: str
) -> None:
    messages = [
        compact_chat.batch([question])[0],
        await compact_chat.ainvoke(question),
        compact_chat.invoke(question, stream=True),
        compact_chat.generate(messages=[[HumanMessage(question)]]).generations[0][0].message,
    ]
    for message in messages:
        assert (message.additional_kwargs, message.response_metadata) == ({}, compact.response_metadata)
    chunks = [list(compact_chat.stream(question)), [chunk async for chunk in compact_chat.astream(question)]]
    for streamed in chunks:
        assert [span for chunk in streamed for span in to_dicts(get_spans(chunk))] == to_dicts(get_spans(quick_answer))
        assert streamed[-1].response_metadata == quick_answer.response_metadata


@pytest.mark.parametrize("stream", [False, True])
def test_callbacks_receive_everything(
    compact_chat: ChatCocoa, quick_answer: AIMessage, question: str, stream: bool
) -> None:
    for detail in ("compact", "none"):
        with get_risk_callback() as risk:
            compact_chat.invoke(question, risk_metadata=detail, stream=stream)
        assert without_run(risk.reports) == [get_risk(quick_answer).to_dict()]


def test_a_call_and_a_model_choose_the_detail(
    quick_engine: CocoaEngine, quick_answer: AIMessage, question: str
) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, risk_metadata="none")
    silent = chat.invoke(question)
    assert set(silent.response_metadata) == {"model_name", "finish_reason", *silent.response_metadata} - {"cocoa_risk"}
    assert silent.additional_kwargs == {}
    with pytest.raises(ConfigError, match="risk_metadata='none'"):
        get_risk(silent).to_dict()
    assert to_dicts(get_spans(silent)) == []
    whole = chat.invoke(question, risk_metadata="full")
    assert (whole.additional_kwargs, whole.response_metadata) == (
        quick_answer.additional_kwargs,
        quick_answer.response_metadata,
    )
    assert chat.bind(risk_metadata="compact").invoke(question).response_metadata["cocoa_risk"]["compact"] is True
    assert all(
        not chunk.additional_kwargs and "cocoa_risk" not in chunk.response_metadata for chunk in chat.stream("a")
    )
    with pytest.raises(ConfigError, match="risk_metadata"):
        chat.invoke(question, risk_metadata="some")
    chat.risk_metadata = "some"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="risk_metadata"):
        list(chat.stream(question))


def test_a_compact_stream_adds_up_to_the_message(compact_chat: ChatCocoa, compact: AIMessage, question: str) -> None:
    whole = add(list(compact_chat.stream(question, risk_metadata="compact")))
    assert (whole.text, whole.additional_kwargs) == (compact.text, {})
    assert whole.response_metadata == compact.response_metadata
    with pytest.raises(HallucinationRiskError):
        list((compact_chat.bind(risk_metadata="compact") | risk_gate(0.0)).stream(question))


def test_log_probabilities_stay_where_they_were_asked_for(
    compact_chat: ChatCocoa, quick_answer: AIMessage, question: str
) -> None:
    asked = compact_chat.invoke(question, logprobs=True)
    assert asked.response_metadata["logprobs"] == quick_answer.response_metadata["logprobs"]
    assert asked.response_metadata["cocoa_risk"]["compact"] is True
    assert "logprobs" not in compact_chat.invoke(question, logprobs=False, risk_metadata="full").response_metadata


def test_an_agent_keeps_compact_messages_and_no_second_copy(compact_chat: ChatCocoa, question: str) -> None:
    for streamed in (False, True):
        agent = create_agent(compact_chat, tools=[], middleware=[RiskMiddleware(0.0)])
        asked = {"messages": [("user", question)]}
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


def test_a_cached_answer_has_the_detail_of_its_call(quick_engine: CocoaEngine, question: str) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, cache=InMemoryCache())
    chat.invoke(question, risk_metadata="none")
    assert chat.invoke(question).response_metadata["cocoa_risk"]["compact"] is True
    assert len(chat.cache._cache) == 1
    assert chat.invoke(question, risk_metadata="full").additional_kwargs["cocoa_spans"]


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
    quick_engine: CocoaEngine, quick_answer: AIMessage, question: str, unstreamed: dict[str, Any]
) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, **unstreamed)
    for [chunk] in (list(chat.stream(question)), [chunk async for chunk in chat.astream(question)]):
        assert chunk.response_metadata == quick_answer.response_metadata
        assert chunk.additional_kwargs == quick_answer.additional_kwargs
    [small] = chat.stream(question, risk_metadata="compact")
    assert (small.additional_kwargs, small.response_metadata) == ({}, chat.invoke(question).response_metadata)
    [silent] = chat.bind(risk_metadata="none").stream(question)
    assert "cocoa_risk" not in silent.response_metadata


@pytest.mark.filterwarnings("ignore:The method .*stream_v3")
@pytest.mark.parametrize("detail", ["full", "none"])
def test_v3_events_are_always_full(
    compact_chat: ChatCocoa, quick_answer: AIMessage, live: Any, question: str, detail: Any
) -> None:
    asked = {"version": "v3", "risk_metadata": detail, "config": {"callbacks": [live]}}
    stream = compact_chat.stream_events(question, **asked)
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
    quick_chat: ChatCocoa, quick_answer: AIMessage, question: str
) -> None:
    async def nested(text: str) -> str:
        return (await quick_chat.ainvoke(text)).content  # an ordinary call inside a chain streams its events too

    for runnable in (quick_chat, RunnableLambda(nested)):
        events = [event async for event in runnable.astream_events(question, version="v2")]
        chunks = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
        [end] = [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]
        assert [span for chunk in chunks for span in to_dicts(get_spans(chunk))] == to_dicts(get_spans(quick_answer))
        assert get_risk(chunks[-1]).to_dict() == get_risk(end).to_dict() == get_risk(quick_answer).to_dict()
        assert to_dicts(get_spans(end)) == to_dicts(get_spans(quick_answer))


async def test_v2_events_of_a_text_model(quick_llm: CocoaLLM) -> None:
    [[generation]] = quick_llm.generate(["Once"]).generations
    chain = PromptTemplate.from_template("{x}") | quick_llm
    events = [event async for event in chain.astream_events({"x": "Once"}, version="v2")]
    chunks = [event["data"]["chunk"] for event in events if event["event"] == "on_llm_stream"]
    assert [span for chunk in chunks for span in to_dicts(get_spans(chunk))] == to_dicts(get_spans(generation))
    assert get_risk(chunks[-1]).to_dict() == get_risk(generation).to_dict()
    # Asked of the model itself, LangChain streams mere text; the end event is whole in both cases.
    events += [event async for event in quick_llm.astream_events("Once", version="v2")]
    ends = [event["data"]["output"] for event in events if event["event"] == "on_llm_end"]
    assert [end["generations"][0][0]["generation_info"] for end in ends] == [generation.generation_info] * 2


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_both_output_versions_carry_it(
    quick_engine: CocoaEngine, quick_answer: AIMessage, question: str, version: str
) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, output_version=version, risk_metadata="full")
    for message in (add(list(chat.stream(question))), chat.invoke(question)):
        assert message.text == quick_answer.text
        assert get_risk(message).to_dict() == get_risk(quick_answer).to_dict()
        assert to_dicts(get_spans(message)) == to_dicts(get_spans(quick_answer))
