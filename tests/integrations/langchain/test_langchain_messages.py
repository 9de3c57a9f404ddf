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
from cocoa_integrations.langchain.messages import to_chat, to_entries


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


def test_the_name_of_a_call_is_that_of_its_result() -> None:
    call = {"name": "f", "args": {}}
    calls = AIMessage("", tool_calls=[{**call, "id": None}, {**call, "id": "1"}])
    entries = to_entries([HumanMessage("a"), calls, ToolMessage("b", tool_call_id="1"), HumanMessage("c")])
    assert [entry.get("name") for entry in entries] == [None, None, "f", None]


def test_messages_without_a_role_are_refused() -> None:
    with pytest.raises(PromptError, match="cannot hold messages of type FunctionMessage"):
        to_chat([HumanMessage("Hi"), FunctionMessage("a", name="f")])
