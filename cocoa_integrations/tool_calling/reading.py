"""Parsing of JSON, and of the tool calls, in a complete or a partial answer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from cocoa_engine.integration import short_repr
from cocoa_integrations._shared.reasoning import without_partial
from cocoa_integrations.tool_calling.formats import CallFormat

MAX_DEPTH = 64  # deeper values have no path of their own

_NAME = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def new_id() -> str:
    """An id for a call: nine letters and digits, as Mistral's templates require."""
    return uuid4().hex[:9]


@dataclass(frozen=True)
class Call:
    """One call, which may be partial. It has ``id`` and ``text``, all of it, once the answer is complete."""

    name: str | None = None  # None before the key of the arguments
    written: str = ""  # the JSON of the arguments so far; all of a call that has no name
    arguments: dict[str, Any] | None = None  # None until they are complete
    offsets: tuple[int, int] = (0, 0)  # in the text of the answer
    values: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each argument; without the quotes of strings
    error: str | None = None  # why it is invalid; in a partial answer, why the request does not allow it
    id: str = ""
    text: str = ""


@dataclass(frozen=True)
class CallDelta:
    """The new part of the call with a number in the answer. The first part has ``id`` and ``name``."""

    number: int
    id: str | None
    name: str | None
    written: str
    error: str | None = None  # in the last part of an invalid call


@dataclass(frozen=True)
class Reading:
    """A parsed answer: its text outside of calls, and its calls in order."""

    content: str
    calls: list[Call]


_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")  # it gets an id of ours, and every call is one of a function
_BETWEEN = " \t\r\n,;[]"  # besides text between two calls
_CUT_OFF = "the answer ends before the call is complete: max_tokens, max_risk or a stop text cut it off"
_NOT_JSON = "it is not valid JSON"


def read(
    text: str,
    style: CallFormat,
    names: Collection[str],
    refused: Collection[str] = (),
    *,
    several: bool = True,
    done: bool = True,
    start: int = 0,
) -> Reading:
    """Parse the answer that begins at an offset of a generated text, after the reasoning.

    All of it is in a call, in an invalid call or in the text, but for tags, separators and white space around calls. If
    it is not ``done``, text that may be the beginning of a call is left out, so that the result only grows. ``names``
    of tools distinguish a call from other JSON where no tag does. Calls of ``refused`` tools are invalid.
    """
    calls: list[Call] = []
    pieces: list[str] = []

    def part(begin: int, names: Collection[str] | None = None) -> int:
        """Add the calls and the text up to the next tag, and return its end; ``names`` are given without a tag."""
        new: list[Call] = []
        between: list[str] = []
        at = scanned = begin
        while True:
            tags = [found for tag in (style.opening, style.closing) if tag and (found := text.find(tag, scanned)) >= 0]
            stop = min(tags, default=len(text))
            brace = text.find("{", scanned, stop)
            if names is not None and not new and text[scanned : stop if brace < 0 else brace].strip(_BETWEEN):
                return begin
            if brace < 0:
                break
            name, call, end = _call(text, brace, style, done)
            scanned = len(text) if end is None else end
            is_call = names is None or name in names
            if is_call or (end is None and name is None):
                between.append(text[at:brace])
                new += [call] if is_call else []
                at = scanned
            elif not new:
                return begin
        is_open = not done and stop == len(text)
        after = stop + len(style.closing) if text.startswith(style.closing, stop) else stop
        if names is not None and not new:
            return stop if is_open else begin
        if names is None and not any(call.name for call in new):
            if not is_open:  # all between two tags is one invalid call, because it has none with a name
                written = text[begin:stop].strip()
                first = text.index(written, begin)
                error = next((call.error for call in new), _CUT_OFF if stop == len(text) else _NOT_JSON)
                calls.append(Call(written=written, offsets=(first, first + len(written)), error=error))
            return after
        rest = text[at:stop]
        if is_open:
            rest = min((without_partial(rest, tag) for tag in (style.opening, style.closing)), key=len)
        calls.extend(new)
        pieces.extend(piece for piece in (*between, rest) if piece.strip(_BETWEEN))
        return after

    at, first = start, skip_space(text, start)
    tag = text[first : first + len(style.opening)]
    # decoding may have removed the first tag as a special token
    if not style.tagged and text.startswith(("{", "["), first) and not (tag and style.opening.startswith(tag)):
        at = part(start, names)
    while style.opening and (opening := text.find(style.opening, at)) >= 0:
        pieces.append(text[at:opening])
        at = part(opening + len(style.opening))
    if not calls and done:
        return Reading(text[start:], [])
    pieces.append(text[at:] if done else without_partial(text[at:], style.opening))
    for number, call in enumerate(calls):
        error = call.error if done else None
        if call.name in refused:
            error = f"the request does not allow a call of {call.name}"
        elif number and not several:
            error = "only one call was allowed"
        calls[number] = replace(call, error=error)
    return Reading("".join(piece for piece in pieces if piece.strip()), calls)


def _call(text: str, at: int, style: CallFormat, done: bool) -> tuple[str | None, Call, int | None]:
    """The call that begins with a brace: its name if it is complete, the call, and its end once it is known."""
    members = members_at(text, at)
    name: str | None = None
    given: tuple[Any, int, int] | None = None
    problem: str | None = None
    named = True
    for key, value, first, last in members.entries:
        if key == "name" and name is None and isinstance(value, str):
            name = value if can_be_sent(value) else ""
        elif key in _ARGUMENTS and given is None:
            given = value, first, last
        elif key not in _IGNORED and problem is None:
            not_text = key == "name" and not isinstance(value, str)
            problem = "its name is not a string" if not_text else f"it has no place for a member {short_repr(key)}"
            named = given is not None
    end = members.end
    if end is None and name and given and isinstance(given[0], dict) and not problem and members.open_key is None:
        broken = members.at < len(text) and text[members.at] != '"'
        if broken or (done and not text[given[2] :].strip()):  # the last brace is missing
            end = given[2]
    if end is None:
        begins = members.open_at if members.open_key is not None else members.at
        closing = text.find(style.closing, begins) if style.closing else -1
        stop = closing if closing >= 0 else len(text) if done else len(without_partial(text, style.closing))
        cut = Call(
            written=text[at:stop] if done else "", offsets=(at, stop), error=_CUT_OFF if closing < 0 else _NOT_JSON
        )
        if name and named and (given or members.open_key in _ARGUMENTS):
            first, last = given[1:] if given else (begins, stop)
            shown = last if text.startswith("{", first) else first  # others may yet become an object
            cut = replace(cut, name=name, written=strict_json(text[first : stop if done else shown]))
        return name, cut, stop if done else None
    if not name or not named:
        return name, Call(written=text[at:end], offsets=(at, end), error=problem or "it has no name"), end
    value, first, last = given or (None, end, end)
    arguments, written, values = _arguments(text, value, first, last)
    if problem is not None:
        written = strict_json(text[first:end])
    elif arguments is None:
        problem = "its arguments are not a JSON object"
    elif not can_be_sent(arguments):
        problem, written = "its arguments have half of a character (a lone surrogate)", strict_json(text[first:last])
    if problem is not None:
        return name, Call(name, written, offsets=(at, end), error=problem), end
    return name, Call(name, written, arguments, (at, end), values), end


def _arguments(text: str, value: Any, start: int, end: int) -> tuple[Any, str, dict[str, tuple[int, int]]]:
    """The arguments of a complete call, ``None`` if they are not an object; their JSON; and the place of each value."""
    if isinstance(value, dict):
        members = members_at(text, start).entries
        places = {key: without_quotes(inner, first, last) for key, inner, first, last in members}
        return value, strict_json(text[start:end]), places
    if isinstance(value, str):  # some models write the arguments as JSON in a string
        try:
            value = DECODER.decode(value) if value.strip() else None
        except (ValueError, RecursionError):
            return None, text[start:end], {}
        if isinstance(value, dict):
            return value, json.dumps(value, ensure_ascii=False), dict.fromkeys(value, (start, end))
    return ({}, "{}", {}) if value is None else (None, text[start:end], {})


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
    return _STRING.sub(lambda string: _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], string[0]), text)


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
