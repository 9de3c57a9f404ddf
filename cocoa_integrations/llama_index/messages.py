"""LlamaIndex chat messages as the plain messages that a tokenizer's chat template reads."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from cocoa_engine import CocoaEngine, PromptError

_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Role and text of each message. ``additional_kwargs`` are not for the model and stay out of its prompt.

    Raises:
        PromptError: a message holds something other than text.
    """
    result = []
    for message in messages:
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                kind = type(block).__name__
                raise PromptError(f"this model reads text only, but a {message.role.value} message has a {kind}.")
        role = _TEMPLATE_ROLES.get(message.role, message.role.value)
        result.append({"role": role, "content": message.content or ""})
    return result


class ChatTemplatePrompt:
    """The ``messages_to_prompt`` of a model whose user gave none: the tokenizer's chat template."""

    def __init__(self, engine: CocoaEngine) -> None:
        self._engine = engine

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt of these messages, opened for the assistant's answer."""
        return self._engine.render_chat(template_messages(messages))
