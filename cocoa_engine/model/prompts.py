"""Prompts and texts as token ids, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from cocoa_engine.errors import PromptError
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.tokenizer import Tokens


def prompt_ids(model: LanguageModel, tokens: Tokens, prompt: Any, what: str = "prompt") -> list[int]:
    """Token ids of a prompt given as text or as ids.

    Raises:
        PromptError: it is empty, of a wrong type, or has ids outside the vocabulary.
    """
    text = isinstance(prompt, str)
    ids = [] if text and not prompt else tokens.encode(prompt) if text else _checked_ids(model, prompt, what)
    return require_tokens(ids, what)


def require_tokens(ids: list[int], what: str) -> list[int]:
    """The ids, unless there are none.

    Raises:
        PromptError: there are none.
    """
    if not ids:
        raise PromptError(f"the {what} is empty; give some text or at least one token id.")
    return ids


def is_many(texts: Any) -> bool:
    """Whether a list holds texts (each a text or token ids) rather than the token ids of one."""
    values = texts.tolist() if hasattr(texts, "tolist") else texts
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return False
    return any(isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0 for value in values)


def _checked_ids(model: LanguageModel, prompt: Any, what: str) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, Sequence) or isinstance(values, bytes):
        raise PromptError(f"the {what} must be text or a list of token ids, not {type(prompt).__name__}.")
    if any(not isinstance(value, Integral) or isinstance(value, bool) for value in values):
        raise PromptError(f"the {what}, given as a list, must hold token ids (int) only; give one at a time.")
    outside = [value for value in values if not 0 <= value < model.vocab_size]
    if outside:
        raise PromptError(f"token id {outside[0]} is outside the model's vocabulary of {model.vocab_size}.")
    return [int(value) for value in values]
