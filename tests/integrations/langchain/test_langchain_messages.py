"""Messages become what a chat template reads, or a clear error."""

from __future__ import annotations

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from cocoa_engine.errors import PromptError
from cocoa_integrations.langchain.messages import to_chat


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (SystemMessage("a"), {"role": "system", "content": "a"}),
        (HumanMessage("a"), {"role": "user", "content": "a"}),
        (HumanMessage("a", name="Ada"), {"role": "user", "content": "a", "name": "Ada"}),
        (AIMessage("a"), {"role": "assistant", "content": "a"}),
        (AIMessageChunk("a"), {"role": "assistant", "content": "a"}),
        (ChatMessage("a", role="developer"), {"role": "developer", "content": "a"}),
        (HumanMessage(["a", {"type": "text", "text": "b"}]), {"role": "user", "content": "ab"}),
    ],
)
def test_known_messages(message: BaseMessage, expected: dict[str, str]) -> None:
    assert to_chat([message]) == [expected]


def test_messages_without_a_role_are_refused() -> None:
    with pytest.raises(PromptError, match="cannot hold messages of type FunctionMessage"):
        to_chat([HumanMessage("Hi"), FunctionMessage("a", name="f")])


def test_tool_calls_and_results() -> None:
    call = {"name": "f", "args": {"x": 1}, "id": "1"}
    blocks = [{"type": "text", "text": "I call."}, {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]
    faulty = {"name": "f", "args": '{"x": ', "id": "2", "error": None, "type": "invalid_tool_call"}
    function = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    assert to_chat(
        [
            AIMessage(blocks, tool_calls=[call]),
            ToolMessage("a", tool_call_id="1"),
            AIMessage("", invalid_tool_calls=[faulty]),
        ]
    ) == [
        {"role": "assistant", "content": "I call.", "tool_calls": [function]},
        {"role": "tool", "content": "a", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": '{"name": "f", "arguments": {"x": '},
    ]
