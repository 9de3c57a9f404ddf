"""LangChain messages as the plain dicts that a tokenizer's chat template reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

from cocoa_engine.errors import PromptError, UnsupportedFeatureError

ROLES: dict[type[BaseMessage], str] = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant"}


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert a conversation. Metadata of earlier answers, risk reports among it, never reaches the prompt.

    Returns:
        ``{"role": ..., "content": ...}`` per message, with ``"name"`` where a message has one.

    Raises:
        PromptError: there is no text at all, or a message of a kind or with content that the model cannot read.
        UnsupportedFeatureError: the conversation holds tool calls.
    """
    chat = [to_entry(message) for message in messages]
    if not any(entry["content"].strip() for entry in chat):
        raise PromptError("the conversation is empty; give at least one message with text")
    return chat


def to_entry(message: BaseMessage) -> dict[str, Any]:
    """Convert one message; see :func:`to_chat`."""
    entry = {"role": _role(message), "content": _text(message)}
    return {**entry, "name": message.name} if message.name else entry


def _role(message: BaseMessage) -> str:
    if isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls):
        raise UnsupportedFeatureError("the conversation holds tool calls; ChatCocoa does not call tools")
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in ROLES.items():
        if isinstance(message, kind):
            return role
    raise PromptError(
        f"a chat prompt cannot hold messages of type {type(message).__name__}; "
        "known are SystemMessage, HumanMessage, AIMessage and ChatMessage"
    )


def _text(message: BaseMessage) -> str:
    """The text of a message: its content, or its text blocks put together."""
    if isinstance(message.content, str):
        return message.content
    parts = []
    for block in message.content:
        if isinstance(block, str):
            parts.append(block)
        elif isinstance(block.get("text"), str):
            parts.append(block["text"])
        else:
            raise PromptError(
                f"content of type {block.get('type')!r} in {type(message).__name__}; the model reads text only"
            )
    return "".join(parts)
