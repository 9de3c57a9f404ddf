"""Finds the passages of a prompt: from texts or ranges of characters to the positions of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cocoa_engine.errors import ConfigError
from cocoa_engine.model.detokenizer import Detokenizer
from cocoa_engine.model.tokenizer import Tokens


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
