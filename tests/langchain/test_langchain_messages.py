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
from cocoa_integrations.langchain import UnsupportedFeatureError
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


@pytest.mark.parametrize("message", [ToolMessage("a", tool_call_id="1"), FunctionMessage("a", name="f")])
def test_messages_without_a_role_are_refused(message: BaseMessage) -> None:
    with pytest.raises(PromptError, match=f"cannot hold messages of type {type(message).__name__}"):
        to_chat([HumanMessage("Hi"), message])


def test_tool_calls_are_refused() -> None:
    message = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])
    with pytest.raises(UnsupportedFeatureError, match="tool calls"):
        to_chat([HumanMessage("Hi"), message])


def test_content_that_is_no_text_is_refused() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(PromptError, match="content of type 'image_url' in HumanMessage; the model reads text only"):
        to_chat([HumanMessage([{"type": "text", "text": "What is this?"}, picture])])
