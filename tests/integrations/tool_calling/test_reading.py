"""JSON and calls are found in answers as models write them, whole, cut off, malformed, or still growing."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocoa_integrations._shared.reasoning import ReasoningSplitter
from cocoa_integrations.tool_calling.call_format import CallFormat
from cocoa_integrations.tool_calling.calls import Reading
from cocoa_integrations.tool_calling.formats import HERMES
from cocoa_integrations.tool_calling.json_text import MAX_DEPTH, field_offsets
from cocoa_integrations.tool_calling.reading import read
from tests.helpers.streamed_calls import added_up, pieces_of
from tests.helpers.tool_templates import LLAMA_CALLS, MISTRAL_CALLS

NAMES = ("weather", "add")
WEATHER = '{"name": "weather", "arguments": {"city": "Lyon", "days": 3}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}'


def calls_of(reading: Reading) -> list[tuple[str | None, Any, str | None]]:
    return [(call.name, call.arguments, call.error) for call in reading.calls]


def tagged(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


def adding(arguments: str) -> str:
    """A call with these arguments, and with what else stands behind them."""
    return tagged(f'{{"name": "add", "arguments": {arguments}}}')


WEATHER_CALL = ("weather", {"city": "Lyon", "days": 3}, None)
ADD_CALL = ("add", {"a": 1, "b": [2, {"c": None}]}, None)


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        (HERMES, "It is sunny.", "It is sunny.", []),
        (HERMES, "  \n", "  \n", []),
        (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [WEATHER_CALL]),
        (HERMES, f"Let me look.\n<tool_call>{WEATHER}</tool_call>", "Let me look.\n", [WEATHER_CALL]),
        (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}", "", [WEATHER_CALL, ADD_CALL]),
        (HERMES, f"<tool_call>[{WEATHER}, {ADD}]</tool_call> Done.", " Done.", [WEATHER_CALL, ADD_CALL]),
        (HERMES, f"<tool_call>{WEATHER}<tool_call>{ADD}</tool_call>", "", [WEATHER_CALL, ADD_CALL]),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", {}, None)]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1}, None)]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1}, None)]),
        (HERMES, adding('{"a": "x </tool_call> y"}'), "", [("add", {"a": "x </tool_call> y"}, None)]),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "", [("add", None, "not a JSON object")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "", [("add", None, "not valid")]),
        (HERMES, "<tool_call>weather(Lyon)</tool_call>.", ".", [(None, None, "not valid")]),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "", [(None, None, "no name")]),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", [(None, None, "name is not a string")]),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>', "", [(None, None, "no name")]),
        (HERMES, f"<tool_call>{WEATHER}\n{ADD}</tool_call>", "", [WEATHER_CALL, ADD_CALL]),
        (HERMES, f"<tool_call>{WEATHER}, {ADD}</tool_call>", "", [WEATHER_CALL, ADD_CALL]),
        (HERMES, f"<tool_call>[{WEATHER}\n{ADD}]</tool_call>", "", [WEATHER_CALL, ADD_CALL]),
        (HERMES, f"<tool_call>{WEATHER} and more</tool_call>.", " and more.", [WEATHER_CALL]),
        (HERMES, f"<tool_call>To look: {WEATHER}</tool_call>", "To look: ", [WEATHER_CALL]),
        (HERMES, f"<tool_call>{WEATHER}</tool_call> {{and}} <tool_call>{ADD}", " {and} ", [WEATHER_CALL, ADD_CALL]),
        (HERMES, f"<tool_call>{WEATHER[:-1]}</tool_call> Done.", " Done.", [WEATHER_CALL]),
        (HERMES, f"<tool_call>{WEATHER[:-1]}, {ADD}</tool_call> Done.", " Done.", [WEATHER_CALL, ADD_CALL]),
        (HERMES, f"<tool_call>{WEATHER} {{broken</tool_call>", "", [WEATHER_CALL, (None, None, "not valid JSON")]),
        (HERMES, f"<tool_call>{WEATHER} {{broken", "", [WEATHER_CALL, (None, None, "before the call is")]),
        (HERMES, '<tool_call>{"name": "add", "a": 1}</tool_call>', "", [(None, None, "no place for a member 'a'")]),
        (HERMES, adding('{"a": 1}, "b": 2'), "", [("add", None, "no place for a member 'b'")]),
        (HERMES, adding('{"a": 1}, "arguments": {"a": 2}'), "", [("add", None, "no place for a member 'arguments'")]),
        (HERMES, adding('{"a": "\\ud800"}'), "", [("add", None, "half of a character")]),
        (HERMES, adding('{"a": "x\ny"}'), "", [("add", {"a": "x\ny"}, None)]),
        *(
            (HERMES, f'<tool_call>{{"name": "add"{none}}}</tool_call>', "", [("add", {}, None)])
            for none in ("", *(f', "arguments": {value}' for value in ("null", "{}", '""', '" "', '"null"', '"{}"')))
        ),
        (LLAMA_CALLS, f"{WEATHER}; {ADD}", "", [WEATHER_CALL, ADD_CALL]),
        (LLAMA_CALLS, f"{WEATHER} and {ADD} too", " and  too", [WEATHER_CALL, ADD_CALL]),
        (LLAMA_CALLS, f'{WEATHER} {{"name": "Lyon"}}', ' {"name": "Lyon"}', [WEATHER_CALL]),
        (LLAMA_CALLS, '{"name": "add", "a": 1}', "", [(None, None, "no place for a member 'a'")]),
        (MISTRAL_CALLS, f"[{WEATHER} {ADD}] Done.", "] Done.", [WEATHER_CALL, ADD_CALL]),
        (MISTRAL_CALLS, f"Look. [TOOL_CALLS] [{WEATHER}] [TOOL_CALLS] [{ADD}]", "Look. ", [WEATHER_CALL, ADD_CALL]),
        (MISTRAL_CALLS, "[TOOL_CALLS] sorry", "", [(None, None, "before the call is")]),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1', "", [("add", None, "before the call is")]),
        (HERMES, '<tool_call>\n{"name": "ad', "", [(None, None, "before the call is")]),
        (HERMES, "<tool_call>", "", [(None, None, "before the call is")]),
        (LLAMA_CALLS, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1}, None)]),
        (LLAMA_CALLS, '{"name": "Lyon", "country": "France"}', '{"name": "Lyon", "country": "France"}', []),
        (LLAMA_CALLS, "{1, 2} is a set.", "{1, 2} is a set.", []),
        (LLAMA_CALLS, '{"name": "add", "parameters": {"a": ', "", [("add", None, "before the call is")]),
        (MISTRAL_CALLS, f"[TOOL_CALLS] [{WEATHER}, {ADD}]", "", [WEATHER_CALL, ADD_CALL]),
        (MISTRAL_CALLS, f" [{WEATHER}]", "", [WEATHER_CALL]),
        (MISTRAL_CALLS, "[1, 2]", "[1, 2]", []),
        (HERMES, adding('{"a": NaN}'), "", [("add", None, "not valid JSON")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "", [("add", None, "not valid")]),
    ],
)
def test_what_models_write(style: CallFormat, text: str, content: str, calls: list[Any]) -> None:
    reading = read(text, style, NAMES)
    assert reading.content == content
    assert len(reading.calls) == len(calls)
    for (name, arguments, error), expected in zip(calls_of(reading), calls, strict=True):
        assert (name, arguments) == expected[:2]
        assert (error is None) == (expected[2] is None)
        assert expected[2] is None or expected[2] in str(error)
    _assert_grows(style, text, reading)


def _assert_grows(style: CallFormat, text: str, whole: Reading) -> None:
    """What is read of a part is never taken back."""
    content, written = "", [""] * len(whole.calls)
    for end in range(len(text) + 1):
        part = read(text[:end], style, NAMES, done=False)
        assert part.content.startswith(content)
        assert len(part.calls) <= len(whole.calls)
        for number, call in enumerate(part.calls):
            assert call.written.startswith(written[number])
            assert call.name in (None, whole.calls[number].name)
            written[number] = call.written
        content = part.content
    assert whole.content.startswith(content)
    assert all(call.written.startswith(seen) for seen, call in zip(written, whole.calls, strict=True))
    assert all(seen == call.written for seen, call in zip(written, whole.calls, strict=True) if call.error is None)


def streamed(style: CallFormat, parts: list[str], *, several: bool = True) -> list[Any]:
    """The text and the calls of an answer whose parts came one after the other."""

    def reading(text: str, *, done: bool = True, start: int = 0, marks: Any = ()) -> Reading:
        return read(text, style, NAMES, several=several, done=done, start=start)

    splitter = ReasoningSplitter(SimpleNamespace(tokenizer=None))  # type: ignore[arg-type]
    return added_up(pieces_of(SimpleNamespace(splitter=lambda: splitter, read=reading), parts)[0])


def words(*texts: str) -> Counter[str]:
    return Counter(re.findall(r"[WKÉ✓]\d+", " ".join(texts)))


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallFormat, str]:
    """A format, and an answer of calls and other text, right and wrong, in which every word occurs once."""
    style = draw(st.sampled_from([HERMES, LLAMA_CALLS, MISTRAL_CALLS]))
    count = iter(range(10_000))

    def word(kind: str = "W") -> str:
        return f"{draw(st.sampled_from([kind, 'É', '✓']))}{next(count)}"

    def value(depth: int = 0) -> str:
        kinds = ["text", "null", "number", "odd"] + ["object", "list", "quoted"] * (depth < 2)
        match draw(st.sampled_from(kinds)):
            case "text":
                return f'"{word()}"'
            case "odd":
                tags = ["</tool_call>", "<tool_call>", "[TOOL_CALLS]"]
                signs = st.sampled_from(["\n", ", ", "{", "}", "[", "]", *tags, '\\"', "\\u00e9", "\\ud800"])
                return f'"{word()}{draw(signs)}{word()}"'
            case "null":
                return draw(st.sampled_from(["null", "true"]))
            case "number":
                return draw(st.sampled_from(["1", "-2.5e3", "NaN"]))
            case "object":
                return (
                    "{" + ", ".join(f'"{word("K")}": {value(depth + 1)}' for _ in range(draw(st.integers(0, 2)))) + "}"
                )
            case "list":
                return "[" + ", ".join(value(depth + 1) for _ in range(draw(st.integers(0, 2)))) + "]"
        return json.dumps(value(depth + 1), ensure_ascii=False)

    def call() -> str:
        members = {
            "name": f'"name": "{draw(st.sampled_from(["add", "weather", *([word()] if style.tagged else [])]))}"',
            "arguments": f'"{draw(st.sampled_from(["arguments", "parameters"]))}": {value(draw(st.integers(0, 1)))}',
            "other": f'"{word("K")}": {value(1)}',
            "id": '"id": "abc"',
        }
        orders = [("name", "arguments")] * 4 + [
            ("arguments", "name"), ("name",), ("name", "other"), ("name", "arguments", "other"), ("arguments",),
            ("id", "name", "arguments"), ("other", "name", "arguments"), ("name", "arguments", "arguments"),
        ]  # fmt: skip
        written = "{" + draw(st.sampled_from([", ", " ", ",\n"])).join(
            members[key] for key in draw(st.sampled_from(orders))
        )
        return written + draw(st.sampled_from(["}", "}", "}", "", "}}", ",}"]))

    def text() -> str:
        return draw(
            st.sampled_from(
                [" ", ", ", "\n", ";", word(), f" {word()} ", f"{{{word()}}}", f"[{word()}", "<", f"</tool_{word()}"]
            )
        )

    def part() -> str:
        inside = "".join(draw(st.sampled_from([call, text]))() for _ in range(draw(st.integers(0, 3))))
        if draw(st.booleans()):
            inside = f"[{inside}]"
        return (
            draw(st.sampled_from([style.opening, style.opening, ""]))
            + inside
            + draw(st.sampled_from([style.closing, style.closing, ""]))
        )

    whole = "".join(draw(st.sampled_from([part, part, call, text]))() for _ in range(draw(st.integers(1, 4))))
    return style, whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(answers(), st.randoms(use_true_random=False), st.booleans())
def test_nothing_that_a_model_wrote_vanishes_and_streams_say_the_same(
    answer: tuple[CallFormat, str], random: Any, several: bool
) -> None:
    style, text = answer
    whole = read(text, style, NAMES, several=several)
    written = [part for call in whole.calls for part in (call.name or "", call.written)]
    assert words(whole.content, *written) == words(text)
    for call in whole.calls:
        assert (call.arguments is None) == (call.error is not None) or call.error == "only one call was allowed"
        if call.arguments is not None:
            assert call.name
            assert json.loads(call.written) == call.arguments  # as other parsers read it
            json.dumps(call.arguments, ensure_ascii=False).encode()
    for size in (1, 7, 40):
        cuts = sorted({0, len(text), *(random.randrange(len(text) + 1) for _ in range(len(text) // size))})
        parts = [text[start:end] for start, end in pairwise(cuts)]
        expected = [[call.name, call.written, call.error] for call in whole.calls]
        assert streamed(style, parts, several=several) == [whole.content, *expected]


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000, f'"{"[" * 100_000}"'])
def test_what_python_cannot_read_is_an_error_of_the_call(value: str) -> None:
    for arguments in (f'{{"a": {value}}}', value):
        (call,) = read(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>', HERMES, NAMES).calls
        assert call.error is not None or call.arguments == {"a": "[" * 100_000}


def test_values_are_where_they_are_said_to_be() -> None:
    text = f"Well, <tool_call>\n{WEATHER}\n</tool_call><tool_call>{ADD}</tool_call>"
    weather, add = read(text, HERMES, NAMES).calls
    assert {name: text[start:end] for name, (start, end) in weather.values.items()} == {"city": "Lyon", "days": "3"}
    assert {name: text[start:end] for name, (start, end) in add.values.items()} == {"a": "1", "b": '[2, {"c": null}]'}
    assert [text[slice(*call.offsets)] for call in (weather, add)] == [WEATHER, ADD]


@pytest.mark.parametrize("style", [HERMES, LLAMA_CALLS, MISTRAL_CALLS])
def test_nothing_is_called_before_the_answer_begins(style: CallFormat) -> None:
    thought = f"<think>I could {style.write('add', {'a': 1})}.</think>"
    text = thought + style.write("weather", {"city": "Lyon"})
    (call,) = read(text, style, NAMES, start=len(thought)).calls
    assert call.name == "weather"
    assert text[slice(*call.values["city"])] == "Lyon"
    assert read(thought, style, NAMES, start=len(thought)) == Reading("", [])
    assert read(f"{thought} Hi", style, NAMES, start=len(thought)) == Reading(" Hi", [])


def test_a_second_call_is_an_error_where_one_was_allowed() -> None:
    reading = read(f"<tool_call>{WEATHER}</tool_call><tool_call>{ADD}</tool_call>", HERMES, NAMES, several=False)
    assert calls_of(reading) == [WEATHER_CALL, (*ADD_CALL[:2], "only one call was allowed")]


TEXT = '{"person": {"name": "Zoë \\"Z\\"", "age": 42}, "items": [{"name": "tea"}, [1, null], ""], "it\'s": true}'


def texts(text: str) -> dict[str, str]:
    return {path: text[start:end] for path, (start, end) in field_offsets(text).items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            TEXT,
            {
                "$.person": '{"name": "Zoë \\"Z\\"", "age": 42}',
                "$.person.name": 'Zoë \\"Z\\"',
                "$.person.age": "42",
                "$.items": '[{"name": "tea"}, [1, null], ""]',
                "$.items[0]": '{"name": "tea"}',
                "$.items[0].name": "tea",
                "$.items[1]": "[1, null]",
                "$.items[1][0]": "1",
                "$.items[1][1]": "null",
                "$.items[2]": '""',
                "$['it\\'s']": "true",
            },
        ),
        (' [1, "a"] ', {"$[0]": "1", "$[1]": "a"}),
        (' "a" ', {"$": "a"}),
        *((text, {}) for text in ("{}", "no JSON", "")),
        ('{"a b": {"c": 1}}', {"$['a b']": '{"c": 1}', "$['a b'].c": "1"}),
    ],
)
def test_every_value_has_its_path_and_its_place(text: str, expected: dict[str, str]) -> None:
    assert texts(text) == expected


def test_a_text_that_was_cut_off_has_its_complete_values() -> None:
    whole = field_offsets(TEXT)
    for end in range(len(TEXT)):
        cut = field_offsets(TEXT[:end])
        assert cut.items() <= whole.items()
        assert cut.keys() >= {path for path, (_, last) in whole.items() if last < end - 2}
    assert texts('{"a": {"b": 1, "c": "x') == {"$.a.b": "1"}


def test_deep_nesting_ends_somewhere() -> None:
    assert len(field_offsets("[" * 5000)) == 0
    deep = "[" * 200 + "]" * 200
    assert len(json.loads(deep)) == 1
    assert len(field_offsets(deep)) == MAX_DEPTH
