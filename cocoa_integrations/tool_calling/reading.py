"""Parsing of the tool calls in a complete or a partial answer."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from cocoa_integrations._shared.reasoning import without_partial
from cocoa_integrations.tool_calling.formats import CallFormat
from cocoa_integrations.tool_calling.json_values import DECODER, members_at, skip_space, without_quotes


def new_id() -> str:
    """An id for a call: nine letters and digits, as Mistral's templates require."""
    return uuid4().hex[:9]


@dataclass(frozen=True)
class Call:
    """One call, which may be partial.

    Attributes:
        name: the name; ``None`` until it is complete.
        written: the text of the arguments so far.
        arguments: the arguments; ``None`` until they are complete.
        offsets: start and end of the call in the text of the answer.
        values: start and end of the value of each argument; those of a string exclude its quotes.
        error: why the call is invalid. Only set for a complete answer.
    """

    name: str | None = None
    written: str = ""
    arguments: dict[str, Any] | None = None
    offsets: tuple[int, int] = (0, 0)
    values: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Reading:
    """A parsed answer: its text outside of calls, and its calls in order."""

    content: str
    calls: list[Call]

    @property
    def valid(self) -> list[Call]:
        """The valid calls."""
        return [call for call in self.calls if call.error is None]

    @property
    def invalid(self) -> list[Call]:
        """The invalid calls."""
        return [call for call in self.calls if call.error is not None]


def read(
    text: str, style: CallFormat, names: Collection[str], *, several: bool = True, done: bool = True, start: int = 0
) -> Reading:
    """Parse an answer.

    Text at the end of a partial answer that may be the beginning of a call is left out, so that the result only grows.
    Whitespace between and around calls is left out.

    Args:
        text: the generated text, complete or partial.
        style: the format of the calls.
        names: the names of the tools, which distinguish a call from other JSON in formats without tags.
        several: whether more than one call is allowed. Otherwise further calls are invalid.
        done: whether the answer is complete.
        start: the offset at which the answer begins, after the reasoning of the model.
    """
    calls, outside = _tagged(text, style, done, start) if style.tagged else _whole(text, style, names, done, start)
    if not calls and done:
        return Reading(text[start:], [])
    if not done:
        outside[-1] = without_partial(outside[-1], style.opening)
    read_calls = [_checked(call, further=number > 0 and not several, done=done) for number, call in enumerate(calls)]
    return Reading("".join(piece for piece in outside if piece.strip()), read_calls)


def _checked(call: Call, *, further: bool, done: bool) -> Call:
    error = call.error if done else None
    if done and call.arguments is None and error is None:
        error = "the answer ends before the call is complete: max_tokens, max_risk or a stop text cut it off"
    if further:
        error = "only one call was allowed"
    return replace(call, error=error)


def _tagged(text: str, style: CallFormat, done: bool, at: int) -> tuple[list[Call], list[str]]:
    """Calls between tags, and the pieces of text around them."""
    calls: list[Call] = []
    pieces: list[str] = []
    while (start := text.find(style.opening, at)) >= 0:
        pieces.append(text[at:start])
        inside = start + len(style.opening)
        found, end = _calls_at(text, inside)
        complete = bool(found) and (found[-1].arguments is not None or found[-1].error is not None)
        # an incomplete object may contain a closing tag in a string that has not ended
        closing = text.find(style.closing, end if complete else inside) if complete or done else -1
        if not complete:
            stop = closing if closing >= 0 else len(text)
            last = found.pop() if found else Call(offsets=(inside, stop))
            if last.name is not None:
                written = last.written[: len(last.written) - (len(text) - stop)]
            else:
                written = text[inside:stop].strip() if done else ""
            error = "it is not valid JSON" if closing >= 0 else None
            found.append(replace(last, written=written, offsets=(last.offsets[0], stop), error=error))
        calls += found
        following = text.find(style.opening, end) if complete else -1
        if closing >= 0 and not 0 <= following < closing:
            at = closing + len(style.closing)
        elif complete:
            at = end if done else following if following >= 0 else len(text)
        else:
            at = len(text)
    return calls, [*pieces, text[at:]]


def _whole(
    text: str, style: CallFormat, names: Collection[str], done: bool, start: int
) -> tuple[list[Call], list[str]]:
    """The calls of an answer that consists of calls only."""
    at = skip_space(text, start)
    opened = bool(style.opening) and text.startswith(style.opening, at)
    if opened:  # decoding may have removed it as a special token
        at = skip_space(text, at + len(style.opening))
    if opened and at == len(text) and not done:
        return [], [""]
    if at == len(text) or text[at] != ("[" if style.listed else "{"):
        return [], [text[start:]]
    calls, end = _calls_at(text, at)
    if any(call.name is not None and call.name not in names for call in calls):
        return [], [text[start:]]
    calls = [call for call in calls if call.name is not None]
    if not calls:
        return [], [text[start:] if done or end < len(text) else ""]
    return calls, [text[end:]]


def _calls_at(text: str, at: int) -> tuple[list[Call], int]:
    """The call or the list of calls at an offset, and the offset where it ends, or the end of the text."""
    at = skip_space(text, at)
    if not text.startswith("[", at):
        if not text.startswith("{", at):
            return [], at
        call, end = _call(text, at)
        return [replace(call, offsets=(at, end))], end
    calls: list[Call] = []
    at = skip_space(text, at + 1)
    while text.startswith("{", at):
        call, end = _call(text, at)
        calls.append(replace(call, offsets=(at, end)))
        at = skip_space(text, end)
        if not text.startswith(",", at):
            break
        at = skip_space(text, at + 1)
    return calls, at + text.startswith("]", at)


def _call(text: str, at: int) -> tuple[Call, int]:
    members = members_at(text, at)
    name = members.complete.get("name", (None,))[0]
    if name is not None and not isinstance(name, str):
        return Call(written=text[at : members.end], error="its name is not a string"), members.at
    key = next((key for key in ("arguments", "parameters") if key in members.complete), None)
    if name is None and members.end is not None:
        return Call(written=text[at : members.end], error="it has no name"), members.at
    if key is not None:
        value, start, end = members.complete[key]
        return _with_arguments(text, name, value, start, end), members.at
    if members.end is not None:
        return Call(name, "{}", {}), members.at
    if members.open_key in ("arguments", "parameters") and text.startswith("{", members.open_at):
        return Call(name, text[members.open_at :]), members.at
    return Call(name), members.at


def _with_arguments(text: str, name: Any, value: Any, start: int, end: int) -> Call:
    written = text[start:end]
    offsets: dict[str, tuple[int, int]] = {}
    if isinstance(value, str):  # some models write the arguments as JSON in a string
        try:
            value = DECODER.decode(value)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            written, offsets = json.dumps(value, ensure_ascii=False), dict.fromkeys(value, (start, end))
    elif isinstance(value, dict):
        for key, (inner, first, last) in members_at(text, start).complete.items():
            offsets[key] = without_quotes(inner, first, last)
    if not isinstance(value, dict):
        return Call(name, written, error="its arguments are not a JSON object")
    if name is None:
        return Call(written=written)
    return Call(name, written, value, values=offsets)
