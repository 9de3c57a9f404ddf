"""Converts prompts and texts to token ids and checks them before the model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from typing_extensions import TypeIs

from cocoa_engine.errors import ChatTemplateError, PromptError
from cocoa_engine.model.detokenizer import decoded
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.text import require_unicode
from cocoa_engine.model.tokenizer import Tokens

Prompt = str | Sequence[int]
"""Text, to which the tokenizer adds its special tokens, or token ids, which are used unchanged."""

Texts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
"""Several texts or token id sequences. Not ``Sequence[str]``, because a single ``str`` is one too."""

Messages = Sequence[Mapping[str, Any]]
"""Chat messages, each with ``role`` and ``content``."""


class ChatTokens(list[int]):
    """Token ids of chat messages that hold an earlier exchange.

    Attributes:
        question_tokens: the number of tokens that the prompt would have without it: with the system messages and the
            longest message of the user only.
    """

    def __init__(self, ids: Sequence[int], question_tokens: int) -> None:
        super().__init__(ids)
        self.question_tokens = question_tokens


def chat_of(question: str, system: str | None) -> list[dict[str, str]]:
    """The messages that ask a question, after a system message if there is one."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": question}]


def without_history(messages: Messages) -> list[Mapping[str, Any]] | None:
    """The system messages, and the longest of the others that the model did not write; `None` without a history.

    A passage may be in any message of the user, or in the answer of a tool, so the longest is the one that counts.
    """
    system = [one for one in messages if one.get("role") in ("system", "developer")]
    asked = [one for one in messages if one.get("role") not in ("system", "developer", "assistant")]
    if len(system) + len(asked) == len(messages) or not asked:
        return None
    return [*system, max(asked, key=lambda one: len(str(one.get("content"))))]


def chat_ids(tokens: Tokens, messages: Messages, template_kwargs: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Chat messages as text and as token ids, up to the start of the answer.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or it refuses the messages.
    """
    rendered = tokens.render(messages, **template_kwargs)
    ids = tokens.encode_rendered(rendered)
    question = without_history(messages)
    if question is None:
        return rendered.text, ids
    try:
        alone = tokens.encode_rendered(tokens.render(question, **template_kwargs))
    except ChatTemplateError:  # such as of a template that wants the call of a tool before its answer
        return rendered.text, ids
    return rendered.text, ChatTokens(ids, len(alone))


def prompt_ids(model: LanguageModel, tokens: Tokens, prompt: Any, what: str = "prompt") -> list[int]:
    """Token ids of a prompt given as text or as ids.

    Args:
        what: the name of the prompt in error messages.

    Raises:
        PromptError: it is empty, of a wrong type, not valid Unicode, or has ids outside the vocabulary.
    """
    text = isinstance(prompt, str)
    if text:
        require_unicode(prompt, what)
    if not text:
        return require_tokens(_checked_ids(model, prompt, what), what)
    return require_tokens(_of_vocabulary(model, tokens.encode(prompt)) if prompt else [], what)


def require_tokens(ids: list[int], what: str) -> list[int]:
    """Return ``ids``, or raise an error if it is empty.

    Args:
        what: the name of the text in the error message.

    Raises:
        PromptError: ``ids`` is empty.
    """
    if not ids:
        raise PromptError(f"the {what} is empty; give some text or at least one token id.")
    return ids


def _of_vocabulary(model: LanguageModel, ids: list[int]) -> list[int]:
    """Return the token ids of a text.

    Raises:
        PromptError: the model has no embedding of one of them.
    """
    if ids and max(ids) >= model.vocab_size:
        raise PromptError(
            f"the tokenizer gives token id {max(ids)}, which is outside the model's vocabulary of {model.vocab_size}: "
            "load the model's own tokenizer, or extend the model with resize_token_embeddings."
        )
    return ids


def is_many(texts: Any) -> bool:
    """Whether a list holds several texts (each a ``str`` or token ids), rather than the token ids of one text."""
    values = texts.tolist() if hasattr(texts, "tolist") else texts
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return False
    return any(isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0 for value in values)


def _checked_ids(model: LanguageModel, prompt: Any, what: str) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, Sequence) or isinstance(values, bytes):
        raise PromptError(f"the {what} must be text or a list of token ids, not {type(prompt).__name__}.")
    if any(not isinstance(value, Integral) or isinstance(value, bool) for value in values):
        raise PromptError(f"the {what}, given as a list, must hold token ids (int) only; pass one text at a time.")
    outside = [value for value in values if not 0 <= value < model.vocab_size]
    if outside:
        raise PromptError(f"token id {outside[0]} is outside the model's vocabulary of {model.vocab_size}.")
    return [int(value) for value in values]


def is_chat(prompt: Prompt | Messages) -> TypeIs[Messages]:
    """Whether a prompt is a list of chat messages, rather than text or token ids."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)


def require_room(window: int | None, prompt_tokens: int) -> None:
    """Check that a prompt leaves tokens for an answer.

    Args:
        window: the model's context window, in tokens; `None`: no limit.
        prompt_tokens: the length of the prompt.

    Raises:
        PromptError: it does not.
    """
    if window is not None and prompt_tokens >= window:
        raise PromptError(
            f"the prompt has {prompt_tokens} tokens and the model's context window is {window}: no tokens are "
            f"left for an answer. Shorten the prompt by at least {prompt_tokens - window + 1} tokens."
        )


def require_fits(model: LanguageModel, prompt_tokens: int, answer_tokens: int) -> None:
    """Check that a prompt and an answer fit the context window together.

    Raises:
        PromptError: they do not.
    """
    window = model.context_window
    if window is not None and prompt_tokens + answer_tokens > window:
        raise PromptError(
            f"prompt ({prompt_tokens} tokens) and answer ({answer_tokens}) exceed the model's context window of "
            f"{window}."
        )


def text_ids(
    model: LanguageModel, tokens: Tokens, prompt: Prompt, before: list[int], text: Any, what: str = "text"
) -> tuple[list[int], str]:
    """Token ids of a text that follows a prompt, and the text itself, decoded if it was given as ids.

    Args:
        prompt: the prompt. If it is text, prompt and text are tokenized together.
        before: token ids of the prompt.
        text: the text, or its token ids.
        what: the name of the text in error messages.

    Raises:
        PromptError: the text is empty, of a wrong type, or exceeds the context window together with the prompt.
    """
    if not isinstance(text, str) or not text:
        ids = prompt_ids(model, tokens, text, what)
    elif isinstance(prompt, str):
        ids = require_tokens(tokens.continuation(prompt, before, text), what)
    else:
        # the answer of a chat, which makes no control tokens
        ids = require_tokens(tokens.encode(text, add_special_tokens=False, split_special_tokens=True), what)
    _of_vocabulary(model, ids)
    window = model.context_window
    if window is not None and len(before) + len(ids) > window:
        raise PromptError(
            f"prompt ({len(before)} tokens) and {what} ({len(ids)}) exceed the model's context window of {window}."
        )
    return ids, text if isinstance(text, str) else decoded(tokens, ids)
