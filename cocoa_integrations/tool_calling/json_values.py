"""JSON that may be incomplete, with the offsets of its values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 64
"""Deeper values have no path of their own."""

_SPACE = " \t\n\r"
_NAME = re.compile(r"[A-Za-z_]\w*")


def _finite(number: str) -> float:
    """The number as a float.

    Raises:
        ValueError: it is infinite or NaN, which JSON cannot represent.
    """
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a JSON number")
    return value


DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)
"""Not strict, because models write line breaks into strings. It raises ``ValueError`` (also for an integer of thousands
of digits) or ``RecursionError``."""


@dataclass
class Members:
    """The members of a JSON object, or the elements of a list by their index. Both may be incomplete.

    Attributes:
        complete: the value by key, with the start and the end of its text.
        at: the offset up to which the text was parsed.
        end: the end of the object or list, if it is complete.
        open_key: the key of the incomplete value.
        open_at: the start of the incomplete value.
    """

    complete: dict[Any, tuple[Any, int, int]] = field(default_factory=dict)
    at: int = 0
    end: int | None = None
    open_key: str | int | None = None
    open_at: int = 0


def members_at(text: str, at: int) -> Members:
    """Parse the object or list at an offset as far as possible."""
    members = Members(at=len(text))
    listed = text.startswith("[", at)
    closing = "]" if listed else "}"
    at = skip_space(text, at + 1)
    try:
        while not text.startswith(closing, at):
            key: Any = len(members.complete)
            if not listed:
                if not text.startswith('"', at):
                    return members
                key, at = DECODER.raw_decode(text, at)
                at = skip_space(text, at)
                if not text.startswith(":", at):
                    return members
                at = skip_space(text, at + 1)
            start = at
            members.open_key, members.open_at = key, start
            value, end = DECODER.raw_decode(text, start)
            at = skip_space(text, end)
            if at == len(text) and not isinstance(value, (str, dict, list)):  # a number may have more digits
                return members
            members.complete[key], members.open_key = (value, start, end), None
            if text.startswith(",", at):
                at = skip_space(text, at + 1)
            elif not text.startswith(closing, at):
                return members
    except (ValueError, RecursionError):
        return members
    members.at = members.end = at + 1
    return members


def field_offsets(text: str, at: int = 0, path: str = "$") -> dict[str, tuple[int, int]]:
    """Start and end of every value inside the object or list at an offset, by its JSON path.

    The offsets of a string exclude its quotes, unless it is empty. Objects and lists have an entry, as have the values
    in them. A value that was cut off has none, but the complete values in it do. A text that is a single value other
    than an object or a list has the entry of this value.

    Args:
        text: the text.
        at: the offset of the value.
        path: the path of the value.
    """
    at = skip_space(text, at)
    if text.startswith(("{", "["), at):
        return dict(_inner(text, at, path, MAX_DEPTH))
    try:
        value, end = DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return {}
    return {path: without_quotes(value, at, end)}


def _inner(text: str, at: int, path: str, depth: int) -> Iterator[tuple[str, tuple[int, int]]]:
    if depth == 0:
        return
    members = members_at(text, at)
    for key, (value, start, end) in members.complete.items():
        inner = member_path(path, key)
        yield inner, without_quotes(value, start, end)
        if isinstance(value, (dict, list)):
            yield from _inner(text, start, inner, depth - 1)
    if members.open_key is not None and text.startswith(("{", "["), members.open_at):
        yield from _inner(text, members.open_at, member_path(path, members.open_key), depth - 1)


def member_path(path: str, key: str | int) -> str:
    """The path of a member: ``$.name``, ``$[0]``, or ``$['other key']``."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if _NAME.fullmatch(key):
        return f"{path}.{key}"
    escaped = json.dumps(key, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
    return f"{path}['{escaped}']"


def without_quotes(value: Any, start: int, end: int) -> tuple[int, int]:
    """The offsets of a value without the quotes of a string. An empty string keeps them."""
    quotes = int(isinstance(value, str) and value != "")
    return start + quotes, end - quotes


def skip_space(text: str, at: int) -> int:
    """The offset of the next character that is not JSON's whitespace."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
