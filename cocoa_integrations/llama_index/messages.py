"""LlamaIndex chat messages as the plain messages that a tokenizer's chat template reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from cocoa_engine import PromptError

_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def require_text(messages: Sequence[ChatMessage]) -> None:
    """Refuse a conversation that is not text.

    Raises:
        PromptError: there is no text at all, or a message holds something else.
    """
    for message in messages:
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                kind = type(block).__name__
                raise PromptError(f"this model reads text only, but a {message.role.value} message has a {kind}.")
    if not any((message.content or "").strip() for message in messages):
        raise PromptError("the conversation is empty; give at least one message with text.")


def edited(messages: Sequence[ChatMessage], edit: Callable[[str], str]) -> list[ChatMessage]:
    """Copies of the messages with each of their texts changed, in order."""
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


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Role and text of each message. ``additional_kwargs`` are not for the model and stay out of its prompt."""
    return [
        {"role": _TEMPLATE_ROLES.get(message.role, message.role.value), "content": message.content or ""}
        for message in messages
    ]
