"""Parsing of the text and the tool calls in a complete or a partial answer.

Every format has the same surroundings: what opens calls, what stands between two of them, and what closes them. Between
them, a call is a JSON object, a name and a JSON object, or a name and arguments that are written one by one.

In a partial answer, the patterns of the surroundings match partially: what may yet become a part of them is left out.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import regex

from cocoa_engine.integration import short_repr
from cocoa_integrations.tool_calling.call_format import ID, NAME, NUMBER, PLACEHOLDER, CallFormat, Parameters
from cocoa_integrations.tool_calling.calls import Call, Reading
from cocoa_integrations.tool_calling.json_text import arguments_of, can_be_sent, members_at, skip_space, strict_json
from cocoa_integrations.tool_calling.values import typed, value_at

_CUT_OFF = "the answer ends before the call is complete: max_tokens, max_risk or a stop text cut it off"
_NOT_JSON = "it is not valid JSON"
_NOT_AN_OBJECT = "its arguments are not a JSON object"
_NOT_AS_WRITTEN = "its arguments are not written as the format says"
_NOT_THE_FORMAT = "it is not written as the chat template writes calls"

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")  # it gets an id of ours, and every call is one of a function
_BETWEEN = " \t\r\n,;[]"  # besides text between two calls
_BETWEEN_CALLS = f"[{regex.escape(_BETWEEN)}]*"
_NEVER = "\ue003"  # no text has this character
_LONGEST = 400  # characters of a text around calls, with its white space and a name
_TAGS = regex.compile(rf"{PLACEHOLDER.pattern}?(?:<[^<>]*>|[^<\s]+|<)")
_BRACKETS = r"{}()\[\]|"
_WORDS = r"[^\s<>\"'OTHERS]{1,256}?(?:[^\S\n]{1,8}[^\s<>\"'OTHERS]{1,256}?){0,8}?"  # bounded, so that time is linear
_NAME = f"(?P<name>{_WORDS.replace('OTHERS', _BRACKETS)})"
_CDATA = "<![CDATA[", "]]>"
_FENCE = "```"
_LOOKS_LIKE_A_CALL = (
    r'"(?:tool_)?name"\s*:\s*"NAME"\s*,\s*"(?:arguments|parameters)"'
    r"|(?:(?i:<[^<>\s]{0,20}(?:tool|call|function|invoke)[^<>\n]{0,20}>?|\[TOOL_CALLS\]\W{0,3}|```tool\w*))"
    r"\s*[\"']?NAME\b"
)

Parsed = tuple["str | None", Call, "int | None"]
"""A name, which an incomplete call does not have yet, the call, and its end once that is known."""


def read(
    text: str,
    style: CallFormat,
    names: Collection[str],
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
    arguments. ``meant``: JSON in a fence, or at the beginning of a line, that calls a tool is a call, too.
    """
    reader = _Reader("\n" * start + text[start:], style, names, start, done=done)  # the answer begins a line
    reader.read(meant=meant)
    calls = reader.calls
    if not calls and done:
        return Reading(text[start:], [])
    for number, call in enumerate(calls):
        error = call.error if done else None
        if number and not several:
            error = "only one call was allowed"
        calls[number] = replace(call, error=error)
    return Reading("".join(piece for piece in reader.pieces if piece.strip()), calls)


def unread_call(text: str, names: Collection[str], start: int = 0) -> Call | None:
    """What looks like a call in an answer in which none was read; ``None`` if nothing does."""
    name = f"(?:{'|'.join(map(regex.escape, names))})"
    for match in regex.finditer(_LOOKS_LIKE_A_CALL.replace("NAME", name), text[start:]):
        at = start + match.start()
        line = text[text.rfind("\n", start, at) + 1 : at]
        if line.replace(_FENCE, "").count("`") % 2 == 0:  # code in a sentence is about calls
            return Call(written=text[at:].strip(), offsets=(at, len(text)), error=_NOT_THE_FORMAT)
    return None


def end_of_answer(
    text: str, style: CallFormat, names: Collection[str], ends: Collection[str], start: int = 0
) -> int | None:
    """The offset of the first end token that ends an answer; ``None`` if none does, or it is not known yet.

    ``ends`` are those that calls have, too. Such a token ends the answer if what follows it is no call, and no rest of
    one.
    """
    calls = read(text, style, names, start=start).calls
    last = calls[-1].offsets[1] if calls else start
    found = regex.search("|".join(map(regex.escape, ends)), text, pos=last)
    if found is None:
        return None
    ways = [(_BETWEEN_CALLS + _pattern(way), last) for way in style.following if calls]
    if style.several or not calls:
        ways.append((_pattern(style.opening), found.start()))
    matches = (compiled(pattern).fullmatch(text, at, partial=True) for pattern, at in ways)
    return None if any(match and match.partial for match in matches) else found.start()


class _Reader:
    """Collects the calls of an answer, and the pieces of its other text."""

    def __init__(self, text: str, style: CallFormat, names: Collection[str], start: int, *, done: bool) -> None:
        self._text, self._style, self._names, self._start, self._done = text, style, names, start, done
        self._after = self._end_of_call  # what closes the calls that are read
        self._open = False  # the text ends in the midst of calls
        self.calls: list[Call] = []
        self.pieces: list[str] = []

    def read(self, *, meant: bool) -> None:
        text, at, first = self._text, self._start, skip_space(self._text, self._start)
        searched = at
        while match := self._search(self._opening, searched):
            has_tag, loosely = match["bare"] is None, self._begins_bare and match.start() <= first
            count, place, end = len(self.calls), len(self.pieces), at
            if match.partial:
                self._open = True
            elif has_tag or meant or loosely:
                end = self._section(match, loosely=loosely)
            if self._open or has_tag or len(self.calls) > count:
                self.pieces.insert(place, text[at : match.start()])
                at = searched = end
            else:
                searched = max(match.end(), match.start() + 1)
            if self._open:
                return
        self.pieces.append(text[at:])

    def _search(self, pattern: regex.Pattern[str], at: int) -> regex.Match[str] | None:
        """The first match from an offset on, or what may be the beginning of one at the end of a partial answer."""
        match = pattern.search(self._text, at)
        if self._done:
            return match
        unfinished = compiled(f"(?:{pattern.pattern}){_NEVER}")
        begun = unfinished.search(self._text, max(at, len(self._text) - _LONGEST), partial=True)
        return match if match and (begun is None or match.start() <= begun.start()) else begun

    def _match(self, pattern: regex.Pattern[str], at: int) -> regex.Match[str] | None:
        """The match at an offset, if what may follow cannot change it."""
        if not self._done and pattern.fullmatch(self._text, at, partial=True):
            self._open = True
            return None
        return pattern.match(self._text, at)

    def _section(self, opening: regex.Match[str], *, loosely: bool) -> int:
        """Add the calls after what opens them, and the text between them, and return where the text after them begins.

        Without a tag, the calls are objects that name a tool and have, but ``loosely``, arguments.
        """
        is_bare = opening["bare"] is not None
        is_object = is_bare or self._is_object
        closing = _FENCE if opening["fence"] else self._style.closing
        self._after = compiled(_pattern(closing) or _NEVER) if is_object else self._end_of_call
        parse, following = (self._object, self._inside(closing)) if is_object else (self._named_call, self._next)
        count, place, begin = len(self.calls), len(self.pieces), opening.end()
        end, match = begin, self._match(following, begin) if is_object else opening
        while match is not None:
            lead, stop = match["lead"], match.end("lead")
            if match["more"] is None:
                end = match.end()
                if any(call.name for call in self.calls[count:]):
                    self.pieces += [lead] if lead.strip(_BETWEEN) else []
                else:  # all between two tags is one invalid call
                    error = next((call.error for call in self.calls[count:]), None)
                    del self.pieces[place:]
                    self.calls[count:] = [self._invalid(begin, stop, error)]
                break
            name, call, following_at = parse(match.end())
            self._open = following_at is None
            if is_bare:
                has_arguments = any(f'"{key}"' in self._text[slice(*call.offsets)] for key in _ARGUMENTS)
                self._open = self._open and (name is None or name in self._names)
                call = replace(call, is_bare=not loosely)
                if name not in self._names or not (loosely or has_arguments):
                    break
            if self._open and call.name is None:
                break
            if call.arguments is not None and not can_be_sent(call.arguments):
                error = "its arguments have half of a character (a lone surrogate)"
                call = replace(call, arguments=None, error=error)
            self.pieces += [lead] if lead.strip(_BETWEEN) else []
            self.calls.append(call)
            if following_at is None:
                break
            end, match = following_at, self._match(following, following_at)
        if self._open and not any(call.name for call in self.calls[count:]):
            del self.pieces[place:], self.calls[count:]
        return end

    def _invalid(self, begin: int, end: int, error: str | None = None) -> Call:
        """A call that cannot be parsed."""
        written, first = self._text[begin:end].strip(), skip_space(self._text, begin)
        error = error or (_CUT_OFF if end == len(self._text) else _NOT_JSON)
        return Call(written=written, offsets=(first, first + len(written)), error=error)

    # The surroundings of calls.

    @property
    def _is_object(self) -> bool:
        return self._style.members is not None

    @property
    def _begins_bare(self) -> bool:
        """Whether an answer may begin with calls without a tag; decoding may have removed it."""
        return self._is_object and not self._style.tagged

    @cached_property
    def _opening(self) -> regex.Pattern[str]:
        """What stands before calls, with a group ``bare`` if that is no tag of the format."""
        keys = "" if self._begins_bare else '\\s*"(?:name|arguments|parameters)"'
        bare = f"(?P<bare>^[ \\t]*(?:(?P<fence>{_FENCE})[a-z_]*\\s*)?(?=(?:\\[\\s*)?\\{{{keys}))"
        return compiled(f"{bare}|{self._own_opening.pattern}")

    @cached_property
    def _own_opening(self) -> regex.Pattern[str]:
        style = self._style
        if self._is_object:
            return compiled(_pattern(style.opening) or _NEVER)
        before, head = _pattern(style.before), _pattern(style.head)
        if not style.tagged:
            begin = head or before or f"(?:\\G|{_pattern(style.separator) or _NEVER})"
            opening = f"{begin}{self._untagged}"
        elif head and before:
            opening = f"(?:{head}(?:\\s*{before})?|{before})"
        else:
            opening = head or before
            if self._headers:
                first, last = map(regex.escape, (self._headers[0], self._headers[-1]))
                # names of another space, and words in a text, are no call without the rest of a header
                rest = f"[^\\s<>{{}}]{{0,256}}\\s?(?:{first}\\w*\\s?)?[\\w/-]{{0,80}}\\s?(?:<[^<>]*>\\w*)?"
                space = "".join(regex.findall("\\w+\\.$", style.before))
                named = f"{_pattern(space)}(?={rest}(?:{last}|\\{{|\\Z))|(?={rest}{last})"
                before = f"{_pattern(style.before.removesuffix(space))}(?:{named})"
                opening = head or f"(?:{first}[^<>{{}}\\n]{{0,80}}?)?{before}"
        return compiled(f"(?P<more>{opening})(?P<lead>)")

    @cached_property
    def _next(self) -> regex.Pattern[str]:
        """What stands after a call: before the next, or after the last."""
        style = self._style
        separator, before = _pattern(style.separator), _pattern(style.before)
        more = f"(?:{separator}\\s*)?{before}" if before and separator else before or separator or self._untagged
        after, tail = (_some(text) or _NEVER for text in (style.after, style.tail))
        return compiled(f"(?P<lead>)(?:\\s*{after})?(?:(?P<more>\\s*{more})|\\s*{tail})?")

    def _inside(self, closing: str) -> regex.Pattern[str]:
        """Text before an object, or before what closes a series of objects."""
        opening = _pattern(self._style.opening) if self._is_object else ""
        ends = ["(?P<more>(?=\\{))", opening and f"(?={opening})", _pattern(closing), "\\Z" if self._done else ""]
        return compiled(f"(?P<lead>[^{{]*?)(?:{'|'.join(filter(None, ends))})")

    @cached_property
    def _untagged(self) -> str:
        """The beginning of a call in a format without a tag before it."""
        names = "|".join(map(regex.escape, self._names)) or _NEVER
        brace = "" if self._style.parameters else "\\s*\\{"
        return f"\\s*(?=(?:{names})\\s*{_pattern(self._style.between)}{brace})"

    @cached_property
    def _headers(self) -> list[str]:
        """The tags of a message's header, which stand after a name or, for some answers, before it."""
        tags = regex.findall("<[^<>]*>", self._style.between)
        return tags if len(tags) > 1 else []

    @cached_property
    def _end_of_call(self) -> regex.Pattern[str]:
        """What closes a call whose name stands outside of JSON or, if nothing does, the series of calls."""
        style = self._style
        return compiled(_some(style.after) or _some(style.tail) or _pattern(style.end) or _NEVER)

    @cached_property
    def _named(self) -> regex.Pattern[str]:
        """A name, and the text before the arguments, of which a header may begin otherwise."""
        own, between = self._style.parameters, _pattern(self._style.between)
        if not between:
            ends = [_pattern(own.before) if own else "\\{", _some(self._style.after), _some(self._style.tail)]
            return compiled(f"\\s*{_NAME}\\s*(?={'|'.join(filter(None, ends))})")
        tags = regex.findall("<[^<>]*>", self._style.between)
        loosely = ""
        if tags and own is None:
            loosely = f"|\\s*(?P<name>[\\w.-]+)(?![\\w.-])[^{{}}\\n]{{0,80}}?{regex.escape(tags[-1])}"
        return compiled(f"\\s*{_NAME}\\s*{between}{loosely}")

    # The calls themselves.

    def _named_call(self, at: int) -> Parsed:
        """The call that begins with its name."""
        named = self._named.match(self._text, at)
        if named is None:
            return self._broken(None, at, at)
        name, begin = named["name"].strip(), named.start("name")
        if self._style.parameters is not None:
            return self._written_one_by_one(name, begin, named.end(), self._style.parameters)
        first = skip_space(self._text, named.end())
        if not self._text.startswith("{", first):
            return self._broken(name, begin, first, error=_NOT_AN_OBJECT)
        members = members_at(self._text, first)
        if members.end is None:
            return self._broken(name, begin, first, members.broken_at)
        value = {key: inner for key, inner, *_ in members.entries}
        arguments, written, values = arguments_of(self._text, value, first, members.end)
        return name, Call(name, written, arguments, (begin, members.end), values), members.end

    def _broken(self, name: str | None, begin: int, first: int, searched: int = 0, error: str = _NOT_JSON) -> Parsed:
        """A call that is cut off, or broken before ``searched``: its text from ``first`` on, up to the next tag."""
        text, after = self._text, self._after
        edge = self._search(compiled(f"{after.pattern}|{self._own_opening.pattern}"), max(searched, first))
        stop = first + len(text[first : edge.start() if edge else None].rstrip())
        is_cut = not text[first:].strip() if error == _NOT_AN_OBJECT else edge is None or bool(edge.partial)
        shown = "" if error == _NOT_AN_OBJECT and not self._done else strict_json(text[first:stop])
        call = Call(name, shown, None, (begin, max(begin, stop)), error=_CUT_OFF if is_cut else error)
        return name, call, stop if self._done else None

    def _object(self, at: int) -> Parsed:
        """The call that is a JSON object with a name and arguments."""
        text, style, members = self._text, self._style, members_at(self._text, at)
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
        end, named = members.end, bool(name) and named
        has_both = named and member is not None and isinstance(member[0], dict) and problem is None
        if end is None and member and has_both and members.open_key is None:
            broken = members.at < len(text) and text[members.at] != '"'
            if broken or (self._done and not text[member[2] :].strip()):  # the last brace is missing
                end = member[2]
        if end is None and not (named and (member or members.open_key in argument_keys)):
            return name, *self._broken(None, at, at, members.broken_at)[1:]
        if end is None:
            first, complete = member[1:] if member else (members.open_at, None)
            _, call, stop = self._broken(name, at, first, members.broken_at)
            if not self._done:  # others may yet become an object
                shown = text[first : complete or call.offsets[1]] if text.startswith("{", first) else ""
                call = replace(call, written=strict_json(shown))
            return name, call, stop
        if not named:
            return name, Call(written=text[at:end], offsets=(at, end), error=problem or "it has no name"), end
        value, first, last = member or (None, end, end)
        arguments, written, values = arguments_of(text, value, first, last)
        if problem is None and arguments is not None:
            return name, Call(name, written, arguments, (at, end), values), end
        written = written if problem is None else strict_json(text[first:end])
        return name, Call(name, written, offsets=(at, end), error=problem or _NOT_AN_OBJECT), end

    def _written_one_by_one(self, name: str, begin: int, at: int, own: Parameters) -> Parsed:
        text, arguments, values = self._text, dict[str, Any](), dict[str, tuple[int, int]]()
        schema = self._names.get(name) if isinstance(self._names, Mapping) else None
        while True:
            at = skip_space(text, at)
            key = self._key.match(text, at, partial=not self._done)
            if key is None and self._end_of_call.match(text, at):
                return name, Call(name, json.dumps(arguments, ensure_ascii=False), arguments, (begin, at), values), at
            place = None if key is None or key.partial else self._value(key, own, schema)
            if key is None or place is None:
                error = _CUT_OFF if self._end_of_call.search(text, at) is None else _NOT_AS_WRITTEN
                break
            if key["key"] in arguments:
                error = f"it gives the argument {short_repr(key['key'])} twice"
                break
            arguments[key["key"]], first, last, at = place
            values[key["key"]] = first, last
        _, call, stop = self._broken(name, begin, at, error=error)
        return name, replace(call, written=json.dumps(arguments, ensure_ascii=False)[:-1], error=error), stop

    @cached_property
    def _key(self) -> regex.Pattern[str]:
        """The name of an argument, and the texts around it."""
        own = self._style.parameters
        assert own is not None
        name = f"[^\\s<>\"'{_BRACKETS}=:,]{{1,256}}" if own.literal else _WORDS.replace("OTHERS", "")
        kind = '(?P<kind>[^<>"]*?)' if own.kind("string") else ""
        begin, end = map(_pattern, own.edges)
        separator = f"(?:{_pattern(own.separator)}\\s*)?"
        return compiled(f"{separator}{_pattern(own.before)}\\s*(?P<key>{name})\\s*{begin}{kind}{end}")

    @cached_property
    def _end_of_value(self) -> regex.Pattern[str]:
        """The text after a value that another argument or the end of the call follows."""
        own = self._style.parameters
        assert own is not None
        another = f"(?:{_pattern(own.separator)}\\s*)?{_pattern(own.before)}"
        return compiled(f"{_pattern(own.after)}(?=\\s*(?:{another}|{self._end_of_call.pattern}))")

    def _value(self, key: regex.Match[str], own: Parameters, schema: Any) -> tuple[Any, int, int, int] | None:
        """The value after a key, its start and end, and the end of the text after it."""
        text, at = self._text, key.end()
        if own.literal:
            try:
                value, end = value_at(text, at, own.quote if len(own.quote) > 1 else "")
            except ValueError:
                return None
            if not self._done and end == len(text):  # a number may have more digits
                return None
            first = skip_space(text, at)
            quotes = len(own.quote) if text.startswith(own.quote, first) else 1
            inside = quotes if isinstance(value, str) and value else 0
            return value, first + inside, end - inside, end
        closed = self._search(self._end_of_value, at)
        if closed is None and self._done:
            closed = compiled(_pattern(own.after)).search(text, at)
        if closed is None or closed.partial:
            return None
        kind = key.groupdict().get("kind")
        is_text = None if kind is None else kind == own.kind("string")
        before, after = own.between["string"], own.after
        raw = text[at : closed.start()].removeprefix(before[len(before.rstrip()) :])
        first = closed.start() - len(raw)
        raw = raw.removesuffix(after[: len(after) - len(after.lstrip())])
        if raw.startswith(_CDATA[0]) and raw.endswith(_CDATA[1]):
            first, raw, is_text = first + len(_CDATA[0]), raw[len(_CDATA[0]) : -len(_CDATA[1])], True
        return typed(raw, schema, key["key"], is_text=is_text), first, first + len(raw), closed.end()


def compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern, regex.MULTILINE)


def _pattern(text: str) -> str:
    """A regular expression for a text of the format, whatever white space is in it."""
    words = "\\s*".join(map(regex.escape, text.split()))
    return PLACEHOLDER.sub(lambda _: "[^\\s<>\"'|]*?", words)


def _some(text: str) -> str:
    """A regular expression for the tags of a text, of which some may be missing, but not all."""
    tags = _TAGS.findall(text.strip())
    ways = [
        _pattern(tag.lstrip(ID + NAME + NUMBER))
        + "".join(f"(?:\\s*{_pattern(later)})?" for later in tags[number + 1 :])
        for number, tag in enumerate(tags)
    ]
    return f"(?:{'|'.join(ways)})" if ways else ""
