"""Parsing of the text and the tool calls in a complete or a partial answer."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from cocoa_engine.integration import short_repr
from cocoa_integrations._shared.reasoning import without_partial
from cocoa_integrations.tool_calling.call_format import ID, NAME, NUMBER, CallFormat
from cocoa_integrations.tool_calling.calls import (
    CUT_OFF,
    HALF_A_CHARACTER,
    NOT_AN_OBJECT,
    NOT_JSON,
    NOT_THE_FORMAT,
    Call,
    Reading,
)
from cocoa_integrations.tool_calling.json_text import (
    arguments_of,
    can_be_sent,
    members_at,
    skip_space,
    strict_json,
)
from cocoa_integrations.tool_calling.marked_calls import MarkedCalls

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")  # it gets an id of ours, and every call is one of a function
_BETWEEN = " \t\r\n,;[]"  # besides text between two calls
_LOOKS_LIKE_A_CALL = (
    r'"(?:tool_)?name"\s*:\s*"NAME"\s*,\s*"(?:arguments|parameters)"'
    r"|(?:(?i:<[^<>\s]{0,20}(?:tool|call|function|invoke)[^<>\n]{0,20}>?|\[TOOL_CALLS\]\W{0,3}|```tool\w*))"
    r"\s*[\"']?NAME\b"
)
_MEANT = re.compile(r'^[ \t]*(?:```[a-z_]*\s*)?(?=(?:\[\s*)?\{\s*"(?:name|arguments|parameters)")', re.MULTILINE)
_MEANT_BEGINS = re.compile(r'^[ \t]*(?:`{1,2}|(?:```[a-z_]*\s*)?(?:\[\s*)?(?:\{\s*(?:"[a-z]{0,10})?)?)\Z', re.MULTILINE)


def read(
    text: str,
    style: CallFormat,
    names: Collection[str],
    refused: Collection[str] = (),
    *,
    several: bool = True,
    done: bool = True,
    start: int = 0,
    meant: bool = True,
) -> Reading:
    """Parse the answer that begins at an offset of a generated text, after the reasoning.

    All of it is in a call, in an invalid call or in the text, but for tags, separators and white space around calls. If
    it is not ``done``, text that may be the beginning of a call is left out, so that the result only grows. ``names``
    of tools distinguish a call from other JSON where no tag does; those of a mapping come with the schemas of their
    arguments. ``meant``: JSON in a fence, or at the beginning of a line, that calls a tool is a call, too. Calls of
    ``refused`` tools are invalid.
    """
    text = "\n" * start + text[start:]  # the answer begins a line
    answer = _Answer(text, style, names, done)
    marked = MarkedCalls(text, style, names, done, start) if style.members is None else None
    calls, pieces, at = answer.calls, answer.pieces, start
    first = skip_space(text, start)
    tag = text[first : first + len(style.opening)]
    is_bare = marked is None and not style.tagged and text.startswith(("{", "["), first)
    if is_bare and not (tag and style.opening.startswith(tag)):  # decoding may have removed the first tag
        at = answer.part(start, style.closing, names)
    searched, begin = at, -1
    while True:
        if begin != at:
            begin, opening = at, marked.opening(at) if marked else _tag(text, style.opening, at)
        candidate = _MEANT.search(text, searched, len(text) if opening is None else opening[0]) if meant else None
        if candidate is not None:
            bare = _Answer(text, style, names, done)
            end = bare.part(candidate.end(), "```" if "`" in candidate[0] else style.closing, names)
            searched = max(end, candidate.end() + 1)
            if end > candidate.end() and bare.is_meant(end):
                pieces += [text[at : candidate.start()], *bare.pieces]
                calls += [replace(call, is_bare=True) for call in bare.calls]
                at = end
        elif opening is not None:
            pieces.append(text[at : opening[0]])
            at = marked.section(opening[1], calls) if marked else answer.part(opening[1], style.closing)
            searched = max(at, searched)
        else:
            break
    if not calls and done:
        return Reading(text[start:], [])
    rest = text[at:] if done else marked.certain(at) if marked else without_partial(text[at:], style.opening)
    if not done and meant and (begun := _MEANT_BEGINS.search(text, at)):
        rest = rest[: begun.start() - at]
    pieces.append(rest)
    for number, call in enumerate(calls):
        error = call.error if done else None
        if call.name in refused:
            error = f"the request does not allow a call of {call.name}"
        elif number and not several:
            error = "only one call was allowed"
        calls[number] = replace(call, error=error)
    return Reading("".join(piece for piece in pieces if piece.strip()), calls)


def unread_call(text: str, names: Collection[str], start: int = 0) -> Call | None:
    """What looks like a call in an answer in which none was read; ``None`` if nothing does."""
    name = f"(?:{'|'.join(map(re.escape, names))})"
    for match in re.finditer(_LOOKS_LIKE_A_CALL.replace("NAME", name), text[start:]):
        at = start + match.start()
        line = text[text.rfind("\n", start, at) + 1 : at]
        if line.replace("```", "").count("`") % 2 == 0:  # code in a sentence is about calls
            return Call(written=text[at:].strip(), offsets=(at, len(text)), error=NOT_THE_FORMAT)
    return None


def _tag(text: str, tag: str, at: int) -> tuple[int, int] | None:
    begin = text.find(tag, at) if tag else -1
    return None if begin < 0 else (begin, begin + len(tag))


@dataclass
class _Answer:
    """The calls and the other text of an answer whose calls are JSON objects."""

    text: str
    style: CallFormat
    names: Collection[str]
    done: bool
    calls: list[Call] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def is_meant(self, end: int) -> bool:
        """Whether JSON without a tag, up to an offset, names a tool and has arguments, or may yet."""
        if not self.calls or not self.calls[0].name:
            return not self.done and end == len(self.text)
        written = self.text[slice(*self.calls[0].offsets)]
        return any(f'"{key}"' in written for key in _ARGUMENTS)

    def part(self, begin: int, closing: str, names: Collection[str] | None = None) -> int:
        """Add the calls and the text up to the next tag, and return its end; ``names`` are given without a tag."""
        text, opening = self.text, self.style.opening
        new: list[Call] = []
        between: list[str] = []
        at = scanned = begin
        while True:
            tags = [place for tag in (opening, closing) if tag and (place := text.find(tag, scanned)) >= 0]
            stop = min(tags, default=len(text))
            brace = text.find("{", scanned, stop)
            if names is not None and not new and text[scanned : stop if brace < 0 else brace].strip(_BETWEEN):
                return begin
            if brace < 0:
                break
            name, call, end = _call(text, brace, self.style, closing, self.done)
            scanned = len(text) if end is None else end
            is_call = names is None or name in names
            if is_call or (end is None and name is None):
                between.append(text[at:brace])
                new += [call] if is_call else []
                at = scanned
            elif not new:
                return begin
        is_open = not self.done and stop == len(text)
        after = stop + len(closing) if text.startswith(closing, stop) else stop
        if names is not None and not new:
            return stop if is_open else begin
        if names is None and not any(call.name for call in new):
            if not is_open:  # all between two tags is one invalid call, because it has none with a name
                written = text[begin:stop].strip()
                first = text.index(written, begin)
                error = next((call.error for call in new), CUT_OFF if stop == len(text) else NOT_JSON)
                self.calls.append(Call(written=written, offsets=(first, first + len(written)), error=error))
            return after
        rest = text[at:stop]
        if is_open:
            rest = min((without_partial(rest, tag) for tag in (opening, closing)), key=len)
        self.calls.extend(new)
        self.pieces.extend(piece for piece in (*between, rest) if piece.strip(_BETWEEN))
        return after


def _call(text: str, at: int, style: CallFormat, tag: str, done: bool) -> tuple[str | None, Call, int | None]:
    """The call that begins with a brace: its name if it is complete, the call, and its end once that is known."""
    members = members_at(text, at)
    name_keys, argument_keys = (*style.keys(NAME), "name"), (*style.keys({}), *_ARGUMENTS)
    ignored = (*style.keys(ID), *style.keys(NUMBER), *_IGNORED)
    name: str | None = None
    member: tuple[Any, int, int] | None = None
    problem: str | None = None
    named = True
    for key, value, first, last in members.entries:
        if style.keyed and key not in name_keys and name is None:
            name, member = key, (value, first, last)
        elif key in name_keys and name is None and isinstance(value, str):
            name = value if can_be_sent(value) else ""
        elif key in argument_keys and member is None:
            member = value, first, last
        elif key not in ignored and problem is None:
            not_text = key in name_keys and not isinstance(value, str)
            problem = "its name is not a string" if not_text else f"it has no place for a member {short_repr(key)}"
            named = member is not None
    end = members.end
    if end is None and name and member and isinstance(member[0], dict) and not problem and members.open_key is None:
        broken = members.at < len(text) and text[members.at] != '"'
        if broken or (done and not text[member[2] :].strip()):  # the last brace is missing
            end = member[2]
    if end is None:
        begins = members.open_at if members.open_key is not None else members.at
        closing = text.find(tag, begins) if tag else -1
        stop = closing if closing >= 0 else len(text) if done else len(without_partial(text, tag))
        cut = Call(
            written=text[at:stop] if done else "", offsets=(at, stop), error=CUT_OFF if closing < 0 else NOT_JSON
        )
        if name and named and (member or members.open_key in argument_keys):
            first, last = member[1:] if member else (begins, stop)
            shown = last if text.startswith("{", first) else first  # others may yet become an object
            cut = replace(cut, name=name, written=strict_json(text[first : stop if done else shown]))
        return name, cut, stop if done else None
    if not name or not named:
        return name, Call(written=text[at:end], offsets=(at, end), error=problem or "it has no name"), end
    value, first, last = member or (None, end, end)
    arguments, written, values = arguments_of(text, value, first, last)
    if problem is not None:
        written = strict_json(text[first:end])
    elif arguments is None:
        problem = NOT_AN_OBJECT
    elif not can_be_sent(arguments):
        problem, written = HALF_A_CHARACTER, strict_json(text[first:last])
    if problem is not None:
        return name, Call(name, written, offsets=(at, end), error=problem), end
    return name, Call(name, written, arguments, (at, end), values), end
