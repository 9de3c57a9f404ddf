"""LlamaIndex chat messages as the plain dicts that a chat template takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cocoa_engine import PromptError
from cocoa_engine.model.text import require_unicode
from cocoa_integrations.tool_calling.json_values import object_of
from cocoa_integrations.tool_calling.prompt import invalid_call_text

_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def require_text(messages: Sequence[ChatMessage]) -> None:
    """Refuse messages that contain something besides text, tool calls and reasoning, or nothing at all.

    Raises:
        PromptError: the messages have no text, unsupported content, or a lone surrogate.
    """
    for number, message in enumerate(messages):
        require_unicode(message.content or "", f"content of message {number} ({message.role.value})")
        readable = (TextBlock, CachePoint, *((ThinkingBlock, ToolCallBlock) if _role(message) == "assistant" else ()))
        for block in message.blocks:
            if not isinstance(block, readable):
                kind = type(block).__name__
                raise PromptError(f"this model reads text only, but a {message.role.value} message has a {kind}.")
    if not any((message.content or "").strip() or _calls(message) for message in messages):
        raise PromptError("the conversation is empty; give at least one message with text.")


def edited(messages: Sequence[ChatMessage], edit: Callable[[str], str]) -> list[ChatMessage]:
    """Copies of the messages with ``edit`` applied to each of their texts, in order."""
    return [
        message.model_copy(
            update={
                "blocks": [
                    block.model_copy(update={"text": edit(block.text)}) if isinstance(block, TextBlock) else block
                    for block in message.blocks
                ]
            }
        )
        for message in messages
    ]


def to_entries(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages. Only the ``additional_kwargs`` of tool results reach the prompt.

    Returns:
        ``{"role": ..., "content": ...}`` per message, with ``"tool_calls"`` (OpenAI's format, the arguments a dict) for
        an assistant that called tools, with ``"reasoning_content"`` for an assistant that reasoned, and with
        ``"tool_call_id"`` and ``"name"`` for the result of a tool.
    """
    converted: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # names of the tools by the ids of their calls
    for message in messages:
        role = _role(message)
        invalid = [
            invalid_call_text(block.tool_name, str(block.tool_kwargs))
            for block in message.blocks
            if isinstance(block, ToolCallBlock) and arguments_of(block) is None
        ]
        entry: dict[str, Any] = {"role": role, "content": "\n".join(filter(None, [message.content, *invalid]))}
        if calls := _calls(message):
            entry["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        thoughts = [block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock)]
        if reasoning := "".join(thoughts):
            entry["reasoning_content"] = reasoning
        if role == "tool":
            call_id = str(message.additional_kwargs.get("tool_call_id", ""))
            entry |= {"tool_call_id": call_id, "name": message.additional_kwargs.get("name", names.get(call_id, ""))}
        converted.append(entry)
    return converted


def _role(message: ChatMessage) -> str:
    """The role of a message in chat templates."""
    return _TEMPLATE_ROLES.get(message.role, message.role.value)


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    """The tool calls of a message in OpenAI's format, the arguments a dict."""
    return [
        {
            "type": "function",
            "id": block.tool_call_id or "",
            "function": {"name": block.tool_name, "arguments": arguments},
        }
        for block in message.blocks
        if isinstance(block, ToolCallBlock) and (arguments := arguments_of(block)) is not None
    ]


def arguments_of(block: ToolCallBlock) -> dict[str, Any] | None:
    """The arguments of a call; ``None`` if they are not a complete JSON object."""
    return block.tool_kwargs if isinstance(block.tool_kwargs, dict) else object_of(block.tool_kwargs)
