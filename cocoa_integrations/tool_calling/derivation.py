"""The format of tool calls that a chat template writes, derived from calls that it renders."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cocoa_integrations._shared.options import blocks_of
from cocoa_integrations._shared.reasoning import ReasoningTags, without_partial
from cocoa_integrations.tool_calling.call_format import (
    ID,
    NAME,
    NUMBER,
    CallFormat,
    Parameters,
    common_prefix,
    common_suffix,
    json_type,
)
from cocoa_integrations.tool_calling.reading import read

Render = Callable[[Sequence[Mapping[str, Any]], bool], "str | None"]
"""Renders messages, and the beginning of an answer if that is wanted; ``None`` if the template refuses them."""

QUESTION = {"role": "user", "content": "Look."}
_TEXT = "I look."
_THOUGHT = "I think."
_NAMES = "look_it_up", "put_it_off"
TOOL_NAME = _NAMES[0]
_IDS = "a1b2c3d4e", "f5g6h7i8j"
_ARGUMENTS: dict[str, Any] = {
    "a_key": "a value",
    "b_key": 12345,
    "c_key": True,
    "d_key": ["d value"],
    "e_key": {"inner_key": "e value"},
    "f_key": "f value",
}
_SHAPES = "a value", "12345", "(?i:true)", r"\[[^\[\]]*d value[^\[\]]*\]", r"\{[^{}]*e value[^{}]*\}", "f value"
_ONE_BY_ONE = re.compile(
    "(.*?)".join(f"{key}(.*?){shape}" for key, shape in zip(_ARGUMENTS, _SHAPES, strict=True)), re.DOTALL
)
_OTHER = {"other_key": "other value"}
_TEXTS = {"items": {"type": "string"}, "additionalProperties": {"type": "string"}}
_PROPERTIES = {
    key: {"type": json_type(value), "description": "It.", **_TEXTS} for key, value in (_ARGUMENTS | _OTHER).items()
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": []},
        },
    }
    for name in _NAMES
]
_TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_LONE_NUMBER = re.compile(r"(?<![^\W_])[0-9](?![^\W_])")


def answer_of(
    calls: Sequence[tuple[str, Mapping[str, Any]]], text: str = "", *, encoded: bool = False
) -> dict[str, Any]:
    """The message of an assistant with calls of the two tools; ``encoded``: with their arguments as JSON."""
    made = [
        {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if encoded else arguments}
        for name, arguments in calls
    ]
    listed = [{"type": "function", "id": _IDS[number], "function": call} for number, call in enumerate(made)]
    return {"role": "assistant", "content": text, "tool_calls": listed}


@dataclass(frozen=True)
class _Place:
    """Where a rendered call is: its name, and its arguments, which are one JSON object or written one by one."""

    name: int
    begin: int  # after the name
    arguments: int
    end: int
    is_json: bool


class Probe:
    """What a template writes for the answers to a question."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.asked, begun = render([QUESTION], False), render([QUESTION], True)
        self.header = (begun or "")[len(common_prefix([self.asked or "", begun or ""])) :]

    def written(self, message: Mapping[str, Any]) -> str | None:
        """An answer without its header; ``None`` if the template refuses it."""
        rendered = self._render([QUESTION, message], False)
        if self.asked is None or rendered is None:
            return None
        answer = rendered[len(common_prefix([self.asked, rendered])) :]
        return answer[len(_to_tag(common_prefix([self.header, answer]))) :]


def derived(render: Render) -> CallFormat | None:
    """The format of a template's calls; ``None`` if none is derived that reads what the template writes."""
    probe = Probe(render)
    for encoded in (False, True):
        style = _derived(probe, encoded)
        if style is not None and _reads(style, probe, encoded):
            return replace(style, encoded=encoded)
    return None


def reasoning_tags(render: Render) -> ReasoningTags | None:
    """What a template writes around the reasoning of its last answer; ``None`` if it leaves the reasoning out."""
    fields: dict[str, Any] = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    for is_block in (False, True):

        def message(text: str, is_block: bool = is_block, **more: Any) -> dict[str, Any]:
            taken = {"content": blocks_of(_THOUGHT, text)} if is_block else {"content": text, **fields}
            return {"role": "assistant", **more, **taken}

        tags = _reasoning_tags(render, message)
        if tags is not None:
            return replace(tags, is_block=is_block)
    return None


def _reasoning_tags(render: Render, message: Callable[..., dict[str, Any]]) -> ReasoningTags | None:
    """What a template writes around the reasoning of messages that are made from their text and other fields."""
    probe = Probe(render)
    calls = answer_of([(TOOL_NAME, _ARGUMENTS)])["tool_calls"]
    asked = probe.asked or ""
    answer, called, beside = (
        render([QUESTION, made], False)
        for made in (message(_TEXT), message("", tool_calls=calls), message(_TEXT, tool_calls=calls))
    )
    is_alone = bool(called) and beside is None
    answer, called = answer or "", called or ""
    before, mark, after = answer.partition(_THOUGHT)
    if not mark or _TEXT not in after:
        before, mark, after = called.partition(_THOUGHT)
        closing = re.match(rf"\s*(?:{_TAG.pattern})", after)
        if not mark or closing is None or TOOL_NAME not in after:
            return None
        between = until = closing[0]
    else:
        between = after.partition(_TEXT)[0]
        plain = (probe.written({"role": "assistant", "content": _TEXT}) or "").partition(_TEXT)[0]
        without_head = between[: len(between) - len(_from_tag(common_suffix([between, plain])))]
        until = called.partition(_THOUGHT)[2] or without_head or between
    shared = _to_tag(common_prefix([between, until]))
    if (shared[-1:] + between[len(shared) :][:1]).isalnum():  # not in the midst of a word
        shared = shared.rpartition(" ")[0]
    closing_tag = shared.strip() or between.strip()
    begun = before[len(common_prefix([asked, before])) :]
    opening = begun[len(_to_tag(common_prefix([begun, probe.header]))) :].strip()
    if not opening:  # the prompt ends inside the reasoning
        opening = before[max((match.start() for match in _TAG.finditer(before)), default=len(before)) :].strip()
    # the header of the answer may begin like that of the reasoning
    own = without_partial(closing_tag, opening)
    closing_tag, head = own.rstrip(), between.strip()[len(own) :].lstrip()
    return ReasoningTags(opening, closing_tag, head, is_alone=is_alone) if opening and closing_tag else None


def text_ends(render: Render) -> tuple[str, ...]:
    """The tags that a template writes after the text of an answer, and after its calls, without the last one."""
    probe = Probe(render)
    first, rest = _ends(probe, probe.written(answer_of([(TOOL_NAME, _OTHER)], _TEXT)) or "")
    last = max((match.start() for match in _TAG.finditer(rest)), default=0)
    return tuple(foot.strip() for foot in (first, rest[:last]) if _TAG.search(foot))


def _ends(probe: Probe, called: str) -> tuple[str, str]:
    """What ends the text of an answer, as that of one with a call shows, and what then ends the answer."""
    ending = (probe.written({"role": "assistant", "content": _TEXT}) or "").rpartition(_TEXT)[2]
    first = _to_tag(common_prefix([ending, called.partition(_TEXT)[2]]))
    return (first, ending[len(first) :]) if _TAG.search(first) else ("", ending)


def _reads(style: CallFormat, probe: Probe, encoded: bool) -> bool:
    """Whether a format reads calls as a template writes them: arguments of every type, none, and signs in a text."""
    strange = {"a_key": "{\"é\": 'x'}, <b>\n[1]", "f_key": ""}
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for calls in ([(TOOL_NAME, _ARGUMENTS), (_NAMES[1], {})], [(TOOL_NAME, strange)]):
        expected = calls if style.several else calls[:1]
        written = probe.written(answer_of(expected, encoded=encoded))
        reading = None if written is None else read(written, style, schemas)
        if reading is None or [(call.name, call.arguments) for call in reading.calls] != expected:
            return False
    return True


def _derived(probe: Probe, encoded: bool) -> CallFormat | None:
    first, second = (_NAMES[0], _ARGUMENTS), (_NAMES[1], _OTHER)

    def answer(*calls: tuple[str, Mapping[str, Any]], text: str = "") -> str:
        return probe.written(answer_of(calls, text, encoded=encoded)) or ""

    single, double, after_text = answer(first), answer(first, second), answer(first, text=_TEXT)
    place = _place(single, _NAMES[0], _ARGUMENTS)
    if place is None:
        return None
    lead, tail = single[: place.name], single[place.end :]
    ending, other_end = _ends(probe, after_text)[1], ""
    if ending.strip() and not tail.endswith(ending):  # another token ends the turn
        last_tag = (_TAG.findall(tail) or [""])[-1]
        if last_tag not in f"{probe.header}{lead}" and not (probe.asked or "").rstrip().endswith(last_tag):
            tail, other_end = tail[: tail.rindex(last_tag)], last_tag
    tail = tail[: len(tail) - len(ending if tail.endswith(ending) else _from_tag(common_suffix([tail, ending])))]
    with_text = _place(after_text, _NAMES[0], _ARGUMENTS)
    if with_text is not None and _TEXT in after_text[: with_text.name]:
        lead = common_suffix([lead, after_text[: with_text.name].partition(_TEXT)[2]])
    between = single[place.begin : place.arguments]
    parameters = None
    if not place.is_json:
        parameters, between, tail = _parameters(single, place, tail) or (None, between, tail)
        if parameters is None or not (parameters.literal or parameters.after.strip()):
            return None  # nothing tells where a text ends
    called = _place(double, _NAMES[0], _ARGUMENTS)
    following = None if called is None else _place(double, _NAMES[1], _OTHER, called.end)
    if called is None or following is None:
        before, between, after = map(_general, (lead, between, tail))
        style = CallFormat("", before, between, after, parameters=parameters, several=False, end=other_end)
        return replace(style, takes_text=_TEXT in after_text)
    gap = double[called.end : following.name]
    if parameters is not None:
        gap = gap.removeprefix(parameters.quote).removeprefix(parameters.after)
    first_digit = next((digit for digit in _LONE_NUMBER.findall(lead + between) if digit in "01"), "0")
    second_digit = str(int(first_digit) + 1)
    lead, between, tail = (_general(text, first_digit) for text in (lead, between, tail))
    gap = _general(gap, second_digit)
    if not _general(double[following.begin : following.arguments], second_digit).startswith(between):
        return None
    before = _from_tag(common_suffix([lead, gap]))
    before = before if before.strip() else ""
    rest = gap[: len(gap) - len(before)]
    after = _to_tag(common_prefix([rest, tail]))
    return CallFormat(
        head=lead[: len(lead) - len(before)],
        before=before,
        between=between,
        after=after,
        separator=rest[len(after) :],
        tail=tail[len(after) :],
        parameters=parameters,
        end=other_end,
    )


def _place(text: str, name: str, arguments: Mapping[str, Any], start: int = 0) -> _Place | None:
    """Where a call is in a rendered answer."""
    key = next(iter(arguments))
    first = text.find(key, start)
    at = text.rfind(name, start, first)
    if at < 0:
        return None
    begin = at + len(name)
    brace = text.rfind("{", begin, first)
    if brace >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace)
        except ValueError:
            value, end = None, 0
        if value == arguments:
            return _Place(at, begin, brace, end, True)
    last_key, last = list(arguments.items())[-1]
    value_at = text.find(str(last), text.find(last_key, first))
    return None if value_at < 0 else _Place(at, begin, first, value_at + len(str(last)), False)


def _parameters(text: str, place: _Place, tail: str) -> tuple[Parameters, str, str] | None:
    """How arguments are written one by one, the text before the first, and the text after the last."""
    match = _ONE_BY_ONE.match(text, place.arguments)
    if match is None:
        return None
    after_keys, after_values = match.groups()[::2], match.groups()[1::2]
    between = {json_type(value): after for after, value in zip(after_keys, _ARGUMENTS.values(), strict=True)}
    between["string"] = after_keys[0]
    gaps = [text[place.begin : place.arguments], *filter(None, after_values)]
    quote = between["string"].removeprefix(common_prefix([between["string"], between["integer"]]))
    if not quote or not gaps[1].startswith(quote):
        quote = ""
    between["string"] = between["string"].removesuffix(quote)
    gaps = [gaps[0], gaps[1].removeprefix(quote), *gaps[2:]]
    tail = tail.removeprefix(quote)
    before = _from_tag(common_suffix(gaps))
    gaps = [gap[: len(gap) - len(before)] for gap in gaps]
    after = _to_tag(common_prefix([*gaps[1:], tail]))
    separator = gaps[1][len(after) :]
    others = {kind: between["integer"] for kind in ("number", "null") if kind not in between}
    return Parameters(before, between | others, after, separator, quote), gaps[0], tail[len(after) :]


def _general(text: str, number: str = "") -> str:
    """A text with placeholders for names, ids and the number of the call, if calls have one."""
    for names, placeholder in ((_NAMES, NAME), (_IDS, ID)):
        for name in names:
            text = text.replace(name, placeholder)
    return _LONE_NUMBER.sub(lambda match: NUMBER if match[0] == number else match[0], text)


def _from_tag(text: str) -> str:
    """The text without the end of a tag that has begun before it."""
    end = re.match(r"[^<>]*>(?!>)", text)
    return text if end is None else text[end.end() :]


def _to_tag(text: str) -> str:
    """The text without the beginning of a tag that ends after it."""
    opened, closed = text.rfind("<"), text.rfind(">")
    return text[:opened] if opened > closed else text
