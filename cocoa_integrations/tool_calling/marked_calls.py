"""Parsing of calls whose name, and often whose arguments, stand between tags outside of JSON."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from cocoa_engine.integration import short_repr
from cocoa_integrations._shared.reasoning import without_partial
from cocoa_integrations.tool_calling.call_format import PLACEHOLDER, CallFormat, Parameters
from cocoa_integrations.tool_calling.calls import CUT_OFF, HALF_A_CHARACTER, NOT_AN_OBJECT, NOT_JSON, Call
from cocoa_integrations.tool_calling.json_text import arguments_of, can_be_sent, members_at, skip_space, strict_json
from cocoa_integrations.tool_calling.values import typed, value_at

_WORD = re.compile(r"[-+.\w]*")
_TAGS = re.compile(rf"{PLACEHOLDER.pattern}?(?:<[^<>]*>|[^<\s]+|<)")
_BRACKETS = r"{}()\[\]|"
_WORDS = r"[^\s<>\"'OTHERS]{1,256}?(?:[^\S\n]{1,8}[^\s<>\"'OTHERS]{1,256}?){0,8}?"  # bounded, so that time is linear
_NAME = f"(?P<name>{_WORDS.replace('OTHERS', _BRACKETS)})"
_CDATA = "<![CDATA[", "]]>"
_LONGEST = 120  # characters of a header with a name
_NOT_AS_WRITTEN = "its arguments are not written as the format says"


class MarkedCalls:
    """The calls of an answer, from the offset ``start`` of its text."""

    def __init__(self, text: str, style: CallFormat, names: Collection[str], done: bool, start: int) -> None:
        self._text, self._style, self._done, self._start = text, style, done, start
        self._names = names
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}

    def opening(self, at: int) -> tuple[int, int] | None:
        """Start and end of the text before the next name."""
        is_first = at == self._start and not self._style.opening
        match = (is_first and self._untagged.match(self._text, at)) or self._opening.search(self._text, at)
        return None if match is None else (match.start(), match.end())

    def section(self, at: int, calls: list[Call]) -> int:
        """Add the calls that follow, and return where the text after them begins."""
        while True:
            call, end = self._call(at)
            if end is None:
                calls += [call] if call.name is not None or self._done else []
                return len(self._text)
            calls.append(call)
            match = self._next.match(self._text, end)
            if match is None:
                return end
            if match["more"] is None:
                return match.end()
            at = match.end()

    def certain(self, at: int) -> str:
        """The text from an offset on, without an ending that may be the beginning of a tag or of a call."""
        rest = self._text[at:]
        for begun in self._unnamed:
            rest = rest[: max(rest.find(begun, max(0, len(rest) - _LONGEST)), -1) % (len(rest) + 1)]
        style = self._style
        # a call may begin with its name, after text or after another call
        is_first = at == self._start and not style.opening
        follows = at > self._start and not style.before and not style.separator.strip()
        if follows or not style.tagged:
            leads = [lead for lead in (style.opening, style.separator.strip()) if lead]
            last, lead = max(((rest.rfind(lead), lead) for lead in leads), default=(-1, ""))
            begin = last + len(lead) if last >= 0 else 0 if is_first or follows else len(rest)
            if any(f"{name}{style.between}{{".startswith(rest[begin:].lstrip()) for name in self._names):
                rest = rest[: max(last, 0)]
        for _ in self._edges:
            visible = rest.rstrip()
            rest = min((without_partial(visible, f"{tag}\0") for tag in self._edges), key=len)
        return rest

    @cached_property
    def _unnamed(self) -> list[str]:
        """What begins a text of any length before the name of a call."""
        style = self._style
        texts = (PLACEHOLDER.split(text.strip()) for text in (style.head, style.before, style.after))
        return [*(begin for begin, *others in texts if begin and others), *self._headers[:1]]

    @cached_property
    def _edges(self) -> list[str]:
        style = self._style
        texts = (style.head, style.before, style.after, style.tail, style.separator)
        tags = (tag for text in texts for tag in (text.strip(), *_TAGS.findall(text)))
        return ["", *self._headers[:1], *(piece for tag in tags for piece in PLACEHOLDER.split(tag) if piece)]

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        style = self._style
        before, head = _pattern(style.before), _pattern(style.head)
        if not style.tagged:
            return re.compile(f"(?:{head or before or _pattern(style.separator) or '(?!)'}){self._untagged.pattern}")
        if head and before:
            return re.compile(f"{head}(?:\\s*{before})?|{before}")
        channel = f"(?:{re.escape(self._headers[0])}\\w*\\s*)?" if self._headers else ""
        return re.compile(head or f"{channel}{before}")

    @cached_property
    def _untagged(self) -> re.Pattern[str]:
        """The beginning of a call in a format without a tag before it."""
        names = "|".join(map(re.escape, self._names)) or "(?!)"
        brace = "" if self._style.parameters else "\\s*\\{"
        return re.compile(f"\\s*(?=(?:{names})\\s*{_pattern(self._style.between)}{brace})")

    @cached_property
    def _headers(self) -> list[str]:
        """The tags of a message's header, which stand after a name or, for some answers, before it."""
        tags = re.findall("<[^<>]*>", self._style.between)
        return tags if len(tags) > 1 else []

    @cached_property
    def _next(self) -> re.Pattern[str]:
        """What stands between a call and the next, or after the last."""
        style = self._style
        separator, before = _pattern(style.separator), _pattern(style.before)
        more = (
            f"(?:{separator}\\s*)?{before}" if before and separator else before or separator or self._untagged.pattern
        )
        return re.compile(f"(?P<more>\\s*{more})|\\s*{_some(style.tail) or '(?!)'}")

    @cached_property
    def _named(self) -> re.Pattern[str]:
        style = self._style
        between = _pattern(style.between)
        if between:
            return re.compile(f"\\s*{_NAME}\\s*{between}")
        own = style.parameters
        ends = [_pattern(own.before) if own else "\\{", _some(style.after), _some(style.tail)]
        return re.compile(f"\\s*{_NAME}\\s*(?={'|'.join(filter(None, ends))})")

    @cached_property
    def _loosely_named(self) -> re.Pattern[str]:
        """A name, and a header that ends with the last tag of the usual one."""
        tags = re.findall("<[^<>]*>", self._style.between)
        if not tags or self._style.parameters is not None:
            return re.compile("(?!)")
        return re.compile(f"\\s*(?P<name>[\\w.-]+)(?![\\w.-])[^{{}}\\n]{{0,80}}?{re.escape(tags[-1])}")

    @cached_property
    def _after(self) -> re.Pattern[str]:
        return re.compile(_some(self._style.after) or _some(self._style.tail) or "(?!)")

    def _call(self, at: int) -> tuple[Call, int | None]:
        """The call whose name begins at an offset, and its end, once that is known."""
        text = self._text
        named = self._named.match(text, at) or self._loosely_named.match(text, at)
        if named is None:
            if not self._done:
                return Call(), None
            stop = self._stop(at)
            first = skip_space(text, at)
            written = text[first:stop].strip()
            error = CUT_OFF if stop == len(text) else NOT_JSON
            return Call(written=written, offsets=(first, first + len(written)), error=error), stop
        name, begin = named["name"].strip(), named.start("name")
        if self._style.parameters is not None:
            call, end = self._written_one_by_one(name, begin, named.end(), self._style.parameters)
        else:
            call, end = self._json(name, begin, named.end())
        if end is not None and call.arguments is not None and not can_be_sent([name, call.arguments]):
            call = replace(call, arguments=None, error=HALF_A_CHARACTER)
        return call, end

    def _stop(self, at: int) -> int:
        """Where a call ends that cannot be parsed."""
        following = self._opening.search(self._text, at)
        end = len(self._text) if following is None or following.end() == following.start() else following.start()
        match = self._after.search(self._text, at, end)
        return at + len(self._text[at : end if match is None else match.start()].rstrip())

    def _past(self, at: int) -> int:
        """The end of the text after a call, if that has come."""
        first = skip_space(self._text, at)
        match = self._after.match(self._text, first)
        is_begun = (
            not self._done and len(self._text) - first < _LONGEST and not self._whole_after.match(self._text, first)
        )
        return at if match is None or is_begun else match.end()

    @cached_property
    def _whole_after(self) -> re.Pattern[str]:
        """All of the text after a call, where that has an id or a number."""
        return re.compile(_pattern(self._style.after) if PLACEHOLDER.search(self._style.after) else "")

    def _json(self, name: str, begin: int, at: int) -> tuple[Call, int | None]:
        text = self._text
        first = skip_space(text, at)
        if not text.startswith("{", first):
            stop = self._stop(first) if self._done else len(text)
            written, error = ("", CUT_OFF) if first == len(text) else (text[first:stop].strip(), NOT_AN_OBJECT)
            cut = Call(name, written if self._done else "", None, (begin, stop), error=error)
            return cut, self._past(stop) if self._done else None
        members = members_at(text, first)
        if members.end is not None:
            value = {key: inner for key, inner, *_ in members.entries}
            arguments, written, values = arguments_of(text, value, first, members.end)
            return Call(name, written, arguments, (begin, members.end), values), self._past(members.end)
        broken = self._after.search(text, members.open_at if members.open_key is not None else members.at)
        stop = first + len(text[first : broken.start()].rstrip()) if broken is not None else len(text)
        shown = stop if self._done or broken else min(len(without_partial(text, tag)) for tag in self._edges)
        error = NOT_JSON if broken else CUT_OFF
        cut = Call(name, strict_json(text[first : max(first, shown)]), None, (begin, stop), error=error)
        return cut, self._past(stop) if self._done else None

    def _written_one_by_one(self, name: str, begin: int, at: int, own: Parameters) -> tuple[Call, int | None]:
        text = self._text
        arguments: dict[str, Any] = {}
        values: dict[str, tuple[int, int]] = {}
        end: int | None = None
        while True:
            at = skip_space(text, at)
            separator = own.separator.strip()
            begun = skip_space(text, at + len(separator)) if arguments and text.startswith(separator, at) else at
            key = self._key.match(text, begun)
            before, rest = own.before.strip(), text[begun : begun + len(own.before)]
            is_begun = bool(before) and not self._done and (rest.startswith(before) or before.startswith(rest))
            after = None if key is not None or is_begun else self._after.match(text, at)
            if after is not None:
                end = after.end()
                break
            place = None if key is None else self._value(key, own, name)
            if key is None or place is None:
                error = CUT_OFF if self._after.search(text, at) is None else _NOT_AS_WRITTEN
                break
            value, first, last, at = place
            if key["key"] in arguments:
                error = f"it gives the argument {short_repr(key['key'])} twice"
                break
            arguments[key["key"]] = value
            values[key["key"]] = first, last
        written = json.dumps(arguments, ensure_ascii=False)
        if end is not None:
            return Call(name, written, arguments, (begin, at), values), end
        stop = self._stop(at) if self._done else len(text)
        call = Call(name, written[:-1], None, (begin, stop), error=error)
        return call, self._past(stop) if self._done else None

    @cached_property
    def _key(self) -> re.Pattern[str]:
        assert self._style.parameters is not None
        own = self._style.parameters
        name = f"[^\\s<>\"'{_BRACKETS}=:,]{{1,256}}" if own.literal else _WORDS.replace("OTHERS", "")
        kind = '(?P<kind>[^<>"]*?)' if own.kind("string") else ""
        begin, end = map(_pattern, own.edges)
        return re.compile(f"{_pattern(own.before)}\\s*(?P<key>{name})\\s*{begin}{kind}{end}")

    def _value(self, key: re.Match[str], own: Parameters, name: str) -> tuple[Any, int, int, int] | None:
        """The value after a key, its start and end, and the end of the text after it."""
        text, at = self._text, key.end()
        if own.literal:
            try:
                value, end = value_at(text, at, own.quote if len(own.quote) > 1 else "")
            except ValueError:
                return None
            if not self._done and _WORD.match(text, end).end() == len(text):  # type: ignore[union-attr]
                return None
            first = skip_space(text, at)
            quotes = len(own.quote) if text.startswith(own.quote, first) else 1
            inside = quotes if isinstance(value, str) and value else 0
            after = own.after.strip()
            past = skip_space(text, end) + len(after) if text.startswith(after, skip_space(text, end)) else end
            return value, first + inside, end - inside, past
        end_of = self._end_of_value(at, own)
        if end_of is None:
            return None
        kind = key.groupdict().get("kind")
        is_text = None if kind is None else kind == own.kind("string")
        lead = own.between["string"][len(own.between["string"].rstrip()) :]
        first = at + len(lead) if text.startswith(lead, at) else at
        last = end_of.start()
        space = own.after[: len(own.after) - len(own.after.lstrip())]
        if space and text.endswith(space, first, last):
            last -= len(space)
        if text.startswith(_CDATA[0], first) and text.endswith(_CDATA[1], first, last):
            first, last, is_text = first + len(_CDATA[0]), last - len(_CDATA[1]), True
        last = max(first, last)
        value = typed(text[first:last], self._schemas.get(name), key["key"], is_text=is_text)
        return value, first, last, end_of.end()

    def _end_of_value(self, at: int, own: Parameters) -> re.Match[str] | None:
        """The text after a value: the first that another argument or the end of the call follows, else the first."""
        after = re.compile(_pattern(own.after))
        first = after.search(self._text, at)
        match = first
        following = re.compile(
            f"\\s*(?:(?:{_pattern(own.separator)}\\s*)?(?:{_pattern(own.before)})|{self._after.pattern})"
        )
        while match is not None:
            if following.match(self._text, match.end()):
                return match
            if not self._done and self._may_go_on(match.end(), own):
                return None
            match = after.search(self._text, match.end())
        return first if self._done else None

    def _may_go_on(self, at: int, own: Parameters) -> bool:
        """Whether the text ends before it is known what follows."""
        rest = self._text[at:].lstrip()
        edges = (own.separator + own.before, own.before, self._style.after, self._style.tail)
        return any(edge.strip().startswith(rest) for edge in edges) or not rest


def _pattern(text: str) -> str:
    """A regular expression for a text of the format, whatever white space is in it."""
    words = "\\s*".join(map(re.escape, text.split()))
    return PLACEHOLDER.sub(lambda _: "[^\\s<>\"'|]*?", words)


def _some(text: str) -> str:
    """A regular expression for the tags of a text, of which some may be missing, but not all."""
    tags = [_pattern(tag) for tag in _TAGS.findall(text.strip())]
    ways = [tag + "".join(f"(?:\\s*{later})?" for later in tags[number + 1 :]) for number, tag in enumerate(tags)]
    return f"(?:{'|'.join(ways)})" if ways else ""
