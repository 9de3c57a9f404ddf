"""Converts prompts and texts to token ids, checks them before the model runs, and finds the passages of a prompt."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from numbers import Integral
from typing import Any

from typing_extensions import TypeIs

from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError, shortened
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.text import require_unicode
from cocoa_engine.model.tokenizer import Tokens, token_ends

Prompt = str | Sequence[int]
"""Text, to which the tokenizer adds its special tokens, or token ids, which are used unchanged."""

Texts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
"""Several texts or token id sequences. Not ``Sequence[str]``, because a single ``str`` is one too."""

Messages = Sequence[Mapping[str, Any]]
"""Chat messages, each with ``role`` and ``content``."""


class ChatTokens(list[int]):
    """Token ids of chat messages that hold an earlier exchange, and their number without it.

    That is of the system messages and the longest message of the user.
    """

    def __init__(self, ids: Sequence[int], question_tokens: int) -> None:
        super().__init__(ids)
        self.question_tokens = question_tokens


def chat_of(question: str, system: str | None) -> list[dict[str, str]]:
    """The messages that ask a question, after a system message if there is one."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": question}]


def chat_ids(tokens: Tokens, messages: Messages, template_kwargs: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Chat messages as text and as token ids, up to the start of the answer."""
    rendered = tokens.render(messages, **template_kwargs)
    ids = tokens.encode_rendered(rendered)
    system = [message for message in messages if message.get("role") in ("system", "developer")]
    asked = [message for message in messages if message.get("role") not in ("system", "developer", "assistant")]
    if len(system) + len(asked) < len(messages) and asked:
        # a passage may be in any message of the user, or in the answer of a tool, so the longest is the one that counts
        question = [*system, max(asked, key=lambda message: len(str(message.get("content"))))]
        with suppress(ChatTemplateError):  # such as of a template that wants the call of a tool before its answer
            ids = ChatTokens(ids, len(tokens.encode_rendered(tokens.render(question, **template_kwargs))))
    return rendered.text, ids


def is_chat(prompt: Prompt | Messages) -> TypeIs[Messages]:
    """Whether a prompt is a list of chat messages, rather than text or token ids."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(part, Mapping) for part in prompt)


def is_many(texts: Any) -> bool:
    """Whether a list holds several texts (each a ``str`` or token ids), rather than the token ids of one text."""
    values = texts.tolist() if hasattr(texts, "tolist") else texts
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return False
    return any(isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0 for value in values)


def prompt_ids(model: LanguageModel, tokens: Tokens, prompt: Any, what: str = "prompt") -> list[int]:
    """Token ids of a prompt given as text or as ids, checked. Messages call it ``what``."""
    if isinstance(prompt, str):
        require_unicode(prompt, what)
        return _usable(model, tokens.encode(prompt) if prompt else [], what)
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, Sequence) or isinstance(values, bytes):
        raise PromptError(f"the {what} must be text or a list of token ids, not {type(prompt).__name__}.")
    if any(not isinstance(value, Integral) or isinstance(value, bool) for value in values):
        raise PromptError(f"the {what}, given as a list, must hold token ids (int) only; pass one text at a time.")
    return _usable(model, [int(value) for value in values], what)


def _usable(model: LanguageModel, ids: list[int], what: str) -> list[int]:
    """The token ids of a text, if there are any and the model has embeddings of all."""
    if not ids:
        raise PromptError(f"the {what} is empty; give some text or at least one token id.")
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < model.vocab_size:
            raise PromptError(
                f"token id {token_id} is outside the model's vocabulary of {model.vocab_size}. If the tokenizer gives "
                "it, load the model's own tokenizer, or extend the model with resize_token_embeddings."
            )
    return ids


def text_ids(
    model: LanguageModel, tokens: Tokens, prompt: Prompt, before: list[int], text: Any, what: str = "text"
) -> tuple[list[int], str]:
    """Token ids of a text after a prompt with the ids ``before``, and the text, decoded if it was given as ids.

    If the prompt is text, both are tokenized together. They must fit the context window. Messages call the text
    ``what``.
    """
    if isinstance(text, str):
        require_unicode(text, what)
    if not isinstance(text, str) or not text:
        ids = prompt_ids(model, tokens, text, what)
    elif isinstance(prompt, str):
        ids = _usable(model, tokens.continuation(prompt, before, text), what)
    else:
        # the answer of a chat, which makes no control tokens
        ids = _usable(model, tokens.encode(text, add_special_tokens=False, split_special_tokens=True), what)
    require_fits(model, len(before), len(ids), what)
    return ids, text if isinstance(text, str) else token_ends(tokens, ids)[0]


def require_room(window: int | None, prompt_tokens: int) -> None:
    """Check that a prompt leaves tokens for an answer in a context window; `None` is no limit."""
    if window is not None and prompt_tokens >= window:
        raise PromptError(
            f"the prompt has {prompt_tokens} tokens and the model's context window is {window}: no tokens are "
            f"left for an answer. Shorten the prompt by at least {prompt_tokens - window + 1} tokens."
        )


def require_fits(model: LanguageModel, prompt_tokens: int, answer_tokens: int, what: str = "answer") -> None:
    """Check that a prompt and an answer fit the context window together."""
    window = model.context_window
    if window is not None and prompt_tokens + answer_tokens > window:
        raise PromptError(
            f"prompt ({prompt_tokens} tokens) and {what} ({answer_tokens}) exceed the model's context window of "
            f"{window}."
        )


class Passages(tuple[range, ...]):
    """Passages that have been found in a prompt: for each the positions of its tokens."""


Source = Sequence[str] | Sequence[tuple[int, int]] | Passages
"""The passages of a prompt: texts that it contains, (start, end) ranges of its characters, or known passages."""


def passage_positions(
    tokens: Tokens, prompt: Any, token_ids: Sequence[int], source: Source | None, *, add_special_tokens: bool = True
) -> Passages:
    """The positions of the tokens of each passage of a prompt.

    A token belongs to a passage if it has a character of it. The first token of a prompt belongs to none, because it
    attracts attention whatever it is. A text is searched for after the passage before it, and then from the beginning.

    The prompt is text, to which the tokenizer may have added special tokens, or token ids: ranges of these count
    characters of their decoded text, special tokens included.

    Raises:
        ConfigError: the passages are of a wrong type, or one of them is empty or not in the prompt.
    """
    if source is None or isinstance(source, Passages):
        return source or Passages()
    text = prompt if isinstance(prompt, str) else tokens.decode_all(token_ids)
    ranges = _character_ranges(text, source)
    if not ranges:
        return Passages()
    encoded = tokens.encode_with_offsets(text, add_special_tokens=isinstance(prompt, str) and add_special_tokens)
    if encoded is not None and encoded[0] == list(token_ids):
        offsets = encoded[1]
    else:
        ranges, offsets = _decoded(tokens, token_ids, text, ranges)
    passages = []
    for start, end in ranges:
        inside = [at for at, (first, last) in enumerate(offsets) if at and first < min(last, end) and last > start]
        passages.append(range(inside[0], inside[-1] + 1) if inside else range(0))
    return Passages(passages)


def sources_of_batch(source: Any, count: int) -> Sequence[Source | None]:
    """The passages of each prompt of a batch: one list or `None` for each of ``count`` prompts."""
    if source is None:
        return [None] * count
    if isinstance(source, (str, bytes)) or not isinstance(source, Sequence) or any(isinstance(x, str) for x in source):
        raise ConfigError("source takes one list of passages, or None, for each prompt of a batch.")
    if len(source) != count:
        raise ConfigError(f"source is given for {len(source)} prompts; there are {count}.")
    return source


def _character_ranges(text: str, source: Any) -> list[tuple[int, int]]:
    """The range of characters of each passage, which is checked."""
    if isinstance(source, (str, bytes)) or not isinstance(source, Sequence):
        raise ConfigError(f"source takes a list of texts or of (start, end) ranges, not {type(source).__name__}.")
    ranges: list[tuple[int, int]] = []
    for number, passage in enumerate(source):
        if isinstance(passage, str) and passage.strip():
            place = _place(text, passage, ranges)
            if place is None:
                raise ConfigError(
                    f"passage {number} of source ({shortened(passage, 100)!r}) is not in the prompt. Give each passage "
                    "as it stands in the prompt, or its (start, end) range."
                )
            ranges.append(place)
            continue
        pair = tuple(passage) if isinstance(passage, Sequence) and not isinstance(passage, (str, bytes)) else ()
        if len(pair) != 2 or any(type(end) is not int for end in pair) or not 0 <= pair[0] < pair[1] <= len(text):
            raise ConfigError(
                f"passage {number} of source is {passage!r}; the prompt has {len(text)} characters. Give a text that "
                f"is not empty, or a range (start, end) with 0 <= start < end <= {len(text)}."
            )
        ranges.append((pair[0], pair[1]))
    return ranges


def _place(text: str, passage: str, before: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Where a passage is, or without the spaces around it: after the last range of ``before``, or anywhere."""
    for part in (passage, passage.strip()):  # chat templates strip the texts of messages
        for start in (before[-1][1] if before else 0, 0):
            if (at := text.find(part, start)) >= 0:
                return at, at + len(part)
    return None


def _decoded(
    tokens: Tokens, token_ids: Sequence[int], text: str, ranges: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The ranges in the decoded text, and the range of characters that each token has completed in it.

    That text may lack special tokens and spaces that the prompt has. Where the tokenizer changes a passage, the decoded
    text before its ends tells where they are.
    """
    decoded, ends = token_ends(tokens, token_ids)
    offsets, completed = list[tuple[int, int]](), (len(decoded), len(decoded))
    for start, end in reversed([*pairwise([0, *ends])]):
        completed = (start, end) if end > start else completed  # by this token, or by one after it
        offsets.append(completed)
    moved: list[tuple[int, int]] = []
    for start, end in ranges:
        place = _place(decoded, text[start:end], moved)
        if place is None:
            first, last = (len(token_ends(tokens, tokens.encode(text[:at]))[0]) for at in (start, end))
            place = first, last
        moved.append(place)
    return moved, offsets[::-1]
