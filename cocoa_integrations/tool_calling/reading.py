"""Parsing of the tool calls in a complete or a partial answer."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any
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

    All of it is in a call, in an invalid call or in the text, but for tags and separators of calls. If it is not
    ``done``, text at its end that may be the beginning of a call is left out, so that the result only grows. Whitespace
    between and around calls is left out. ``names`` are those of the tools, which distinguish a call from other JSON
    where no tag does. Calls of ``refused`` tools are invalid, and further calls unless ``several`` are allowed.
    """
    whole = Reading("", [])
    pieces: list[str] = []
    at, first = start, json_values.skip_space(text, start)
    tag = text[first : first + len(style.opening)]
    # decoding may have removed the first tag as a special token
    if not style.tagged and text.startswith(("{", "["), first) and not (tag and style.opening.startswith(tag)):
        at = _part(text, start, style, done, whole.calls, pieces, names)
    while style.opening and (opening := text.find(style.opening, at)) >= 0:
        pieces.append(text[at:opening])
        at = _part(text, opening + len(style.opening), style, done, whole.calls, pieces)
    if not whole.calls and done:
        return Reading(text[start:], [])
    pieces.append(text[at:] if done else without_partial(text[at:], style.opening))
    for number, call in enumerate(whole.calls):
        error = call.error if done else None
        if call.name in refused:
            error = f"the request does not allow a call of {call.name}"
        elif number and not several:
            error = "only one call was allowed"
        whole.calls[number] = replace(call, error=error)
    return replace(whole, content="".join(piece for piece in pieces if piece.strip()))


def _part(
    text: str,
    begin: int,
    style: CallFormat,
    done: bool,
    calls: list[Call],
    pieces: list[str],
    names: Collection[str] | None = None,
) -> int:
    """Add the calls after an opening tag up to the next tag, and the text between them; return the end of the part.

    Without a tag ``names`` are those of the tools. JSON without such a name is then text; no part begins if the first
    is.
    """
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
    calls += new
    pieces += [piece for piece in (*between, rest) if piece.strip(_BETWEEN)]
    return after


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
