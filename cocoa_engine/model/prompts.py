"""Converts prompts and texts to token ids, checks them before the model runs, and finds the passages of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from typing_extensions import TypeIs

from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError
from cocoa_engine.model.detokenizer import Detokenizer, decoded
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


class Passages(NamedTuple):
    """Passages that have been found in the tokens of a prompt.

    Attributes:
        positions: for each passage the positions of its tokens.
    """

    positions: tuple[range, ...]


Source = Sequence[str] | Sequence[tuple[int, int]] | Passages
"""The passages of a prompt: texts that it contains, (start, end) ranges of its characters, or known passages."""


def passage_positions(
    tokens: Tokens,
    prompt: Any,
    token_ids: Sequence[int],
    source: Source | None,
    *,
    add_special_tokens: bool = True,
) -> tuple[range, ...]:
    """The positions of the tokens of each passage of a prompt.

    A token belongs to a passage if it has a character of it. The first token of a prompt belongs to none, because it
    attracts attention whatever it is. A text is searched for after the passage before it, and then from the beginning.

    Args:
        tokens: the tokenizer.
        prompt: the prompt as text or token ids. Ranges of token ids count characters of their decoded text, special
            tokens included.
        token_ids: the token ids of the prompt.
        source: the passages. With `None` there are none.
        add_special_tokens: whether the tokenizer added special tokens to the text of the prompt.

    Raises:
        ConfigError: the passages are of a wrong type, or one of them is empty or not in the prompt.
    """
    if source is None:
        return ()
    if isinstance(source, Passages):
        return source.positions
    text = prompt if isinstance(prompt, str) else tokens.decode_all(token_ids)
    ranges = _character_ranges(text, _checked(source))
    if not ranges:
        return ()
    known = tokens.encode_with_offsets(text, add_special_tokens=isinstance(prompt, str) and add_special_tokens)
    if known is None or known[0] != list(token_ids):
        ranges = _moved(tokens, ranges, text, decoded := _decoded(tokens, token_ids))
        offsets = decoded.offsets
    else:
        offsets = known[1]
    return tuple(_positions(start, end, offsets) for start, end in ranges)


def sources_of_batch(source: Any, count: int) -> Sequence[Source | None]:
    """The passages of each prompt of a batch.

    Raises:
        ConfigError: they are not given as one list or `None` for each of ``count`` prompts.
    """
    if source is None:
        return [None] * count
    if isinstance(source, (str, bytes)) or not isinstance(source, Sequence) or any(isinstance(x, str) for x in source):
        raise ConfigError("source takes one list of passages, or None, for each prompt of a batch.")
    if len(source) != count:
        raise ConfigError(f"source is given for {len(source)} prompts; there are {count}.")
    return source


def _checked(source: Any) -> list[str | tuple[int, int]]:
    if isinstance(source, (str, bytes)) or not isinstance(source, Sequence):
        raise ConfigError(f"source takes a list of texts or of (start, end) ranges, not {type(source).__name__}.")
    checked: list[str | tuple[int, int]] = []
    for number, one in enumerate(source):
        if isinstance(one, str) and one.strip():
            checked.append(one)
            continue
        pair = tuple(one) if isinstance(one, Sequence) and not isinstance(one, (str, bytes)) else ()
        if len(pair) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in pair):
            raise ConfigError(
                f"passage {number} of source is {one!r}; give a text that is not empty, or a (start, end) range."
            )
        checked.append((pair[0], pair[1]))
    return checked


def _character_ranges(text: str, source: Sequence[str | tuple[int, int]]) -> list[tuple[int, int]]:
    """The range of characters of each passage."""
    ranges: list[tuple[int, int]] = []
    before = 0
    for number, one in enumerate(source):
        if isinstance(one, str):
            # chat templates strip the texts of messages
            found = _found(text, one, before) or _found(text, one.strip(), before)
            if found is None:
                shown = one if len(one) <= 40 else f"{one[:40]}..."
                raise ConfigError(
                    f"passage {number} of source ({shown!r}) is not in the prompt. Give each passage as it stands in "
                    "the prompt, or its (start, end) range."
                )
        else:
            found = one
            if not 0 <= one[0] < one[1] <= len(text):
                raise ConfigError(
                    f"passage {number} of source is the range {one}; the prompt has {len(text)} characters, so a range "
                    f"(start, end) needs 0 <= start < end <= {len(text)}."
                )
        ranges.append(found)
        before = found[1]
    return ranges


def _found(text: str, part: str, start: int) -> tuple[int, int] | None:
    at = text.find(part, start)
    at = text.find(part) if at < 0 else at
    return None if at < 0 else (at, at + len(part))


class _Decoded(NamedTuple):
    text: str
    offsets: list[tuple[int, int]]


def _decoded(tokens: Tokens, token_ids: Sequence[int]) -> _Decoded:
    """The text of tokens, and the range of characters that each token has completed in it."""
    track = Detokenizer(tokens)
    offsets: list[tuple[int, int]] = []
    waiting = 0  # tokens whose characters are not complete yet
    for token_id in token_ids:
        start = len(track.text)
        track.push(token_id)
        waiting += 1
        if len(track.text) > start:
            offsets += [(start, len(track.text))] * waiting
            waiting = 0
    offsets += [(len(track.text), len(track.text))] * waiting
    return _Decoded(track.text, offsets)


def _moved(tokens: Tokens, ranges: Sequence[tuple[int, int]], text: str, decoded: _Decoded) -> list[tuple[int, int]]:
    """The ranges in the decoded text, which may lack special tokens and spaces that the prompt has.

    Where the tokenizer changes a passage, the decoded text before its ends tells where they are.
    """

    def place(end: int) -> int:
        return len(_decoded(tokens, tokens.encode(text[:end])).text)

    moved: list[tuple[int, int]] = []
    before = 0
    for start, end in ranges:
        found = _found(decoded.text, text[start:end], before) or _found(decoded.text, text[start:end].strip(), before)
        moved.append(found or (place(start), place(end)))
        before = moved[-1][1]
    return moved


def _positions(start: int, end: int, offsets: Sequence[tuple[int, int]]) -> range:
    inside = [
        position
        for position, (first, last) in enumerate(offsets)
        if position > 0 and first < last and first < end and last > start
    ]
    return range(inside[0], inside[-1] + 1) if inside else range(0)
