"""Agents of the langchain package: risk in their messages and streams, tools that run, and tools that are refused."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import (
    ChatCocoa,
    ToolRiskMiddleware,
    argument_risks,
    get_risk,
    get_risk_callback,
    get_spans,
)
from tests.helpers.reports import to_dicts, without_run
from tests.helpers.structured import engine_for_schemas

agents = pytest.importorskip("langchain.agents")
middleware = pytest.importorskip("langchain.agents.middleware")


def test_risk_reaches_messages_updates_and_callbacks(quick_chat: ChatCocoa, quick_answer: Any, question: str) -> None:
    agent = agents.create_agent(quick_chat, tools=[])
    asked = {"messages": [("user", question)]}
    with get_risk_callback() as risk:
        message = agent.invoke(asked)["messages"][-1]
        chunks = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages")]
        [update] = agent.stream(asked, stream_mode="updates")
    expected = get_risk(quick_answer).to_dict()
    assert (
        get_risk(message).to_dict()
        == get_risk(chunks[-1]).to_dict()
        == get_risk(update["model"]["messages"][-1]).to_dict()
        == expected
    )
    assert [span for chunk in chunks for span in to_dicts(get_spans(chunk))] == expected["spans"]
    assert without_run(risk.reports) == [expected] * 3


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    return engine_for_schemas()


def double(number: Literal[7, 42]) -> int:
    """Double a number."""
    return 2 * number


@pytest.fixture
def asked() -> dict[str, Any]:
    return {"messages": [("user", "Double 4.")]}


def agent_of(engine: CocoaEngine, *more: Any) -> Any:
    chat = ChatCocoa(engine=engine, max_tokens=80, initial_tool_choice="any", risk_metadata="full")
    return agents.create_agent(chat, tools=[double], middleware=more)


def test_an_agent_calls_a_tool_and_answers(engine: CocoaEngine, asked: dict[str, Any]) -> None:
    with get_risk_callback() as risk:
        _, call, result, answer = agent_of(engine).invoke(asked)["messages"]
    number = call.tool_calls[0]["args"]["number"]
    assert result.content == str(2 * number)
    assert answer.text
    assert not answer.tool_calls
    assert [get_risk(call).to_dict(), get_risk(answer).to_dict()] == without_run(risk.reports)


async def test_a_risky_call_is_not_run(engine: CocoaEngine, asked: dict[str, Any]) -> None:
    _, call, result, _ = agent_of(engine).invoke(asked)["messages"]
    measured = argument_risks(call)[call.tool_calls[0]["id"]]["number"].risk
    low = 0.9 * measured
    refused = agent_of(engine, ToolRiskMiddleware(low))
    for messages in (refused.invoke(asked)["messages"], (await refused.ainvoke(asked))["messages"]):
        assert messages[2].status == "error"
        assert "double was not run" in messages[2].content
        assert f"number={call.tool_calls[0]['args']['number']} ({measured:.2f})" in messages[2].content
    several = agent_of(engine, ToolRiskMiddleware(0, tools=["other"]), ToolRiskMiddleware(low, tools=["double"]))
    assert several.invoke(asked)["messages"][2].status == "error"
    figures = argument_risks(call)[call.tool_calls[0]["id"]]["number"]
    for metric, value in (("f_mlds", figures.f_mlds), ("self_information", -figures.log_prob)):
        both = agent_of(engine, *(ToolRiskMiddleware(part * value, metric=metric) for part in (1.1, 0.9)))
        (refusal,) = both.invoke(asked)["messages"][2:3]
        assert refusal.status == "error"
        assert f"{metric.replace('_', ' ')} of these arguments" in refusal.content
        assert f"({value:.2f})" in refusal.content
    for lenient in (
        ToolRiskMiddleware(1.1 * measured),
        ToolRiskMiddleware(0, tools=["other"]),
        ToolRiskMiddleware(0, arguments=["other"]),
    ):
        assert agent_of(engine, lenient).invoke(asked)["messages"][2].content == result.content
