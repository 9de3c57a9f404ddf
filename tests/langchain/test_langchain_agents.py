"""Agents of the langchain package: risk in their messages and streams, and no tools dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_integrations.langchain import ChatCocoa, UnsupportedFeatureError, get_risk, get_risk_callback, get_spans

agents = pytest.importorskip("langchain.agents")


def test_risk_reaches_messages_updates_and_callbacks(quick_chat: ChatCocoa, quick_answer: Any, question: str) -> None:
    agent = agents.create_agent(quick_chat, tools=[])
    asked = {"messages": [("user", question)]}
    with get_risk_callback() as risk:
        message = agent.invoke(asked)["messages"][-1]
        chunks = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages")]
        [update] = agent.stream(asked, stream_mode="updates")
    expected = get_risk(quick_answer)
    assert get_risk(message) == get_risk(chunks[-1]) == get_risk(update["model"]["messages"][-1]) == expected
    assert [span for chunk in chunks for span in get_spans(chunk)] == expected["spans"]
    assert risk.reports == [expected] * 3


@pytest.mark.parametrize("with_tools", [True, False])
def test_tools_and_response_formats_raise(quick_chat: ChatCocoa, with_tools: bool) -> None:
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    schema = {"title": "Answer", "type": "object", "properties": {"answer": {"type": "string"}}}
    wanted = {"tools": [double]} if with_tools else {"tools": [], "response_format": schema}
    agent = agents.create_agent(quick_chat, **wanted)
    with pytest.raises(UnsupportedFeatureError, match="does not call tools"):
        agent.invoke({"messages": [("user", "Double 4.")]})
