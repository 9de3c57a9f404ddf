"""Parsing of the tool calls in a complete or a partial answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import uuid4

from cocoa_engine.safe_text import short_repr
from cocoa_integrations._shared.reasoning import without_partial
from cocoa_integrations.tool_calling import json_values
from cocoa_integrations.tool_calling.formats import CallFormat
from cocoa_integrations.tool_calling.json_values import can_be_sent, members_at, strict_json


def new_id() -> str:
    """An id for a call: nine letters and digits, as Mistral's templates require."""
    return uuid4().hex[:9]


@dataclass(frozen=True)
class Call:
    """One call, which may be partial.

    Attributes:
        name: the name; ``None`` before the key of the arguments.
        written: the JSON of the arguments so far; all of a call that has no name.
        arguments: the arguments; ``None`` until they are complete.
        offsets: start and end of the call in the text of the answer.
        values: start and end of the value of each argument; those of a string exclude its quotes.
        error: why the call is invalid. For a partial answer, only set if the request does not allow the call.
        id: the id, once the answer is complete.
        text: all of the call as it was generated, once the answer is complete.
    """

    name: str | None = None
    written: str = ""
    arguments: dict[str, Any] | None = None
    offsets: tuple[int, int] = (0, 0)
    values: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: str | None = None
    id: str = ""
    text: str = ""


@dataclass(frozen=True)
class CallDelta:
    """The new part of a call.

    Attributes:
        number: the index of the call in the answer.
        id: the id, in the first part of a call.
        name: the name, in the first part of a call.
        written: the new text of the arguments.
        error: the error, in the last part of an invalid call.
    """

    number: int
    id: str | None
    name: str | None
    written: str
    error: str | None = None


@dataclass(frozen=True)
class Reading:
    """A parsed answer: its text outside of calls, and its calls in order."""

    content: str
    calls: list[Call]


_ARGUMENTS = ("arguments", "parameters")

_IGNORED = ("id", "type")
"""Members of a call that say nothing: it gets an id of ours, and every call is one of a function."""

_BETWEEN = " \t\r\n,;[]"
"""What may be between two calls besides text: whitespace, separators and the brackets of a list."""

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
    """Parse an answer. All of it is in a call, in an invalid call or in the text, but for tags and separators of calls.

    Text at the end of a partial answer that may be the beginning of a call is left out, so that the result only grows.
    Whitespace between and around calls is left out.

    Args:
        text: the generated text, complete or partial.
        style: the format of the calls.
        names: the names of the tools, which distinguish a call from other JSON where no tag does.
        refused: the names of tools whose calls are invalid.
        several: whether more than one call is allowed. Otherwise further calls are invalid.
        done: whether the answer is complete.
        start: the offset at which the answer begins, after the reasoning of the model.
    """
    part = _untagged(text, start, style, names, done)
    calls, pieces, at = part.calls, part.pieces, part.end
    while style.opening and (opening := text.find(style.opening, at)) >= 0:
        pieces.append(text[at:opening])
        part = _part(text, opening + len(style.opening), style, done)
        calls, pieces, at = calls + part.calls, pieces + part.pieces, part.end
    if not calls and done:
        return Reading(text[start:], [])
    pieces.append(text[at:] if done else without_partial(text[at:], style.opening))
    checked = []
    for number, call in enumerate(calls):
        error = call.error if done else None
        if call.name in refused:
            error = f"the request does not allow a call of {call.name}"
        elif number and not several:
            error = "only one call was allowed"
        checked.append(replace(call, error=error))
    return Reading("".join(piece for piece in pieces if piece.strip()), checked)


class _Part(NamedTuple):
    """The calls in a part of an answer, the pieces of text between them, and the end of the part."""

    calls: list[Call]
    pieces: list[str]
    end: int


def _untagged(text: str, start: int, style: CallFormat, names: Collection[str], done: bool) -> _Part:
    """The calls at the beginning of an answer without a tag, which decoding may have removed as a special token."""
    at = json_values.skip_space(text, start)
    tag = text[at : at + len(style.opening)]
    if style.tagged or not text.startswith(("{", "["), at) or (tag and style.opening.startswith(tag)):
        return _Part([], [], start)
    return _part(text, start, style, done, names)


def _part(text: str, begin: int, style: CallFormat, done: bool, names: Collection[str] | None = None) -> _Part:
    """The calls after an opening tag, or without one, up to the next tag.

    Args:
        names: the names of the tools if there is no tag. JSON without such a name is then text, and no part begins if
            the first is.
    """
    calls: list[Call] = []
    pieces: list[str] = []
    at = scanned = begin
    while True:
        tags = [found for tag in (style.opening, style.closing) if tag and (found := text.find(tag, scanned)) >= 0]
        stop = min(tags, default=len(text))
        brace = text.find("{", scanned, stop)
        if names is not None and not calls and text[scanned : stop if brace < 0 else brace].strip(_BETWEEN):
            return _Part([], [], begin)
        if brace < 0:
            break
        name, call, end = _call(text, brace, style, done)
        if names is None or name in names:
            pieces.append(text[at:brace])
            calls.append(call)
            at = len(text) if end is None else end
        elif end is None and name is None:
            pieces.append(text[at:brace])
            at = len(text)
        elif not calls:
            return _Part([], [], begin)
        scanned = len(text) if end is None else end
    open_ended = not done and stop == len(text)
    if names is not None and not calls:
        return _Part([], [], stop if open_ended else begin)
    if names is None and not any(call.name for call in calls):
        unreadable = [] if open_ended else [_unreadable(text, begin, stop, calls)]
        return _Part(unreadable, [], _after(text, stop, style))
    rest = text[at:stop]
    if open_ended:
        rest = min((without_partial(rest, tag) for tag in (style.opening, style.closing)), key=len)
    return _Part(calls, [piece for piece in (*pieces, rest) if piece.strip(_BETWEEN)], _after(text, stop, style))


def _after(text: str, stop: int, style: CallFormat) -> int:
    """The offset after a closing tag, if there is one at the offset."""
    return stop + len(style.closing) if text.startswith(style.closing, stop) else stop


def _unreadable(text: str, begin: int, stop: int, calls: Sequence[Call]) -> Call:
    """All that is between two tags as one invalid call, because it has no call with a name."""
    written = text[begin:stop].strip()
    begin = text.index(written, begin)
    error = next((call.error for call in calls), _CUT_OFF if stop == len(text) else _NOT_JSON)
    return Call(written=written, offsets=(begin, begin + len(written)), error=error)


def _call(text: str, at: int, style: CallFormat, done: bool) -> tuple[str | None, Call, int | None]:
    """The call that begins with a brace: its name if it is complete, the call, and the offset where it ends.

    A call has a name once the key of its arguments is complete. All of a call without a name is ``written``. The end is
    ``None`` as long as it is not known: a tag may be part of a string that has not ended.
    """
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
        places = {key: json_values.without_quotes(inner, first, last) for key, inner, first, last in members}
        return value, strict_json(text[start:end]), places
    if isinstance(value, str):  # some models write the arguments as JSON in a string
        try:
            value = json_values.DECODER.decode(value) if value.strip() else None
        except (ValueError, RecursionError):
            return None, text[start:end], {}
        if isinstance(value, dict):
            return value, json.dumps(value, ensure_ascii=False), dict.fromkeys(value, (start, end))
    return ({}, "{}", {}) if value is None else (None, text[start:end], {})
