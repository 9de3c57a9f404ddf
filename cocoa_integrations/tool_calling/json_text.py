"""Parsing of JSON that may be cut off, and the places of its values."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 64  # deeper values have no path of their own

_NAME = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a JSON number")
    return value


# not strict, because models write line breaks into strings; raises ValueError or RecursionError
DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)


@dataclass
class Members:
    """The members of a JSON object, or the elements of a list by their index. Both may be incomplete."""

    entries: list[tuple[Any, Any, int, int]] = field(default_factory=list)
    at: int = 0  # the offset up to which the text was parsed
    end: int | None = None  # of the object or list, if it is complete
    open_key: str | int | None = None  # of the incomplete value
    open_at: int = 0  # its start

    @property
    def broken_at(self) -> int:
        """Where what is incomplete begins."""
        return self.at if self.open_key is None else self.open_at


def members_at(text: str, at: int) -> Members:
    members = Members()
    listed = text.startswith("[", at)
    closing = "]" if listed else "}"
    members.at = skip_space(text, at + 1)
    try:
        while not text.startswith(closing, members.at):
            key: Any = len(members.entries)
            if not listed:
                if not text.startswith('"', members.at):
                    return members
                key, end = DECODER.raw_decode(text, members.at)
                end = skip_space(text, end)
                if not text.startswith(":", end):
                    return members
                members.at = skip_space(text, end + 1)
            members.open_key, members.open_at = key, members.at
            value, end = DECODER.raw_decode(text, members.at)
            after = skip_space(text, end)
            if after == len(text) and not isinstance(value, (str, dict, list)):  # a number may have more digits
                return members
            members.entries.append((key, value, members.open_at, end))
            members.open_key, members.at = None, after
            if text.startswith(",", after):
                members.at = skip_space(text, after + 1)
            elif not text.startswith(closing, after):
                return members
    except (ValueError, RecursionError):
        return members
    members.at += 1
    members.end = members.at
    return members


def field_offsets(text: str, at: int = 0, path: str = "$", depth: int = 0) -> dict[str, tuple[int, int]]:
    """Start and end of every complete value inside the object or list at an offset, by its JSON path.

    Those of a string exclude its quotes, unless it is empty. Another single value has the path ``$``.
    """
    at = skip_space(text, at)
    if not text.startswith(("{", "["), at):
        try:
            value, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return {}
        return {path: without_quotes(value, at, end)}
    if depth == MAX_DEPTH:
        return {}
    members, offsets = members_at(text, at), dict[str, tuple[int, int]]()
    for key, value, start, end in members.entries:
        offsets[member_path(path, key)] = without_quotes(value, start, end)
        if isinstance(value, (dict, list)):
            offsets |= field_offsets(text, start, member_path(path, key), depth + 1)
    if members.open_key is not None and text.startswith(("{", "["), members.open_at):
        offsets |= field_offsets(text, members.open_at, member_path(path, members.open_key), depth + 1)
    return offsets


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


def strict_json(text: str) -> str:
    """JSON, which may be cut off, with the line breaks in its strings escaped, which other parsers refuse."""
    if not _CONTROL.search(text):
        return text
    return _STRING.sub(lambda string: _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], string[0]), text)


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; ``None`` if it is none, or one that cannot be sent."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and can_be_sent(value) else None


def can_be_sent(value: Any) -> bool:
    """Whether a value can be written as JSON in UTF-8: it has no lone surrogate, and is not nested too deeply."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\r":
        at += 1
    return at


def arguments_of(text: str, value: Any, start: int, end: int) -> tuple[Any, str, dict[str, tuple[int, int]]]:
    """The arguments of a complete call, ``None`` if they are not an object; their JSON; and the place of each value."""
    if isinstance(value, dict):
        members = members_at(text, start).entries
        places = {key: without_quotes(inner, first, last) for key, inner, first, last in members}
        return value, strict_json(text[start:end]), places
    if isinstance(value, str):  # some models write the arguments as JSON in a string
        if (arguments := object_of(value)) is not None:
            return arguments, json.dumps(arguments, ensure_ascii=False), dict.fromkeys(arguments, (start, end))
        value = value if value.strip() not in ("", "null") else None
    return ({}, "{}", {}) if value is None else (None, text[start:end], {})
