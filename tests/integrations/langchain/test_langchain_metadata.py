"""The metadata survives everything that LangChain does with messages and chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, messages_from_dict, messages_to_dict
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk, get_spans
from tests.helpers.reports import to_dicts


def test_it_is_plain_json(answer: AIMessage) -> None:
    text = json.dumps([answer.response_metadata, answer.additional_kwargs], allow_nan=False)
    assert json.loads(text) == [answer.response_metadata, answer.additional_kwargs]
    assert AIMessage.model_validate_json(answer.model_dump_json()) == answer


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_it_survives_being_stored(answer: AIMessage) -> None:
    assert loads(dumps(answer), allowed_objects="messages") == answer
    assert messages_from_dict(messages_to_dict([answer])) == [answer]


def test_generations_of_a_text_model_are_plain_json(quick_llm: CocoaLLM) -> None:
    [[generation]] = quick_llm.generate(["Once"]).generations
    assert set(generation.generation_info) == {
        "cocoa_spans",
        "cocoa_risk",
        "model_name",
        "finish_reason",
        "logprobs",
        "usage_metadata",
    }
    assert json.loads(json.dumps(generation.generation_info, allow_nan=False)) == generation.generation_info


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


@pytest.mark.filterwarnings("ignore:The method .*stream_v3")
def test_v3_events_carry_spans_and_report(
    quick_chat: ChatCocoa, quick_answer: AIMessage, live: Any, question: str
) -> None:
    stream = quick_chat.stream_events(question, version="v3", config={"callbacks": [live]})
    finish = list(stream)[-1]
    assert finish["metadata"]["cocoa_risk"] == get_risk(quick_answer).to_dict()
    assert finish["additional_kwargs"]["cocoa_spans"] == to_dicts(get_spans(quick_answer))
    assert get_risk(stream.output).to_dict() == get_risk(quick_answer).to_dict()
    assert live.spans == to_dicts(get_spans(quick_answer))


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_both_output_versions_carry_it(
    quick_engine: CocoaEngine, quick_answer: AIMessage, question: str, version: str
) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, output_version=version, risk_metadata="full")
    whole = None
    for chunk in chat.stream(question):
        whole = chunk if whole is None else whole + chunk
    for message in (whole, chat.invoke(question)):
        assert message.text == quick_answer.text
        assert get_risk(message).to_dict() == get_risk(quick_answer).to_dict()
        assert to_dicts(get_spans(message)) == to_dicts(get_spans(quick_answer))
