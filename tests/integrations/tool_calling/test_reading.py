"""Calls are found in answers as models write them, whole, cut off, malformed, or still growing."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_integrations.tool_calling.formats import HERMES, LLAMA, MISTRAL, CallFormat
from cocoa_integrations.tool_calling.reading import Reading, read

NAMES = ("weather", "add")
WEATHER = '{"name": "weather", "arguments": {"city": "Lyon", "days": 3}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}'


def calls_of(reading: Reading) -> list[tuple[str | None, Any, str | None]]:
    return [(call.name, call.arguments, call.error) for call in reading.calls]


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
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": {"a": "x </tool_call> y"}}</tool_call>',
            "",
            [("add", {"a": "x </tool_call> y"}, None)],
        ),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "", [("add", None, "not a JSON object")]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "", [("add", None, "not valid")]),
        (HERMES, "<tool_call>weather(Lyon)</tool_call>.", ".", [(None, None, "not valid")]),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "", [(None, None, "no name")]),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", [(None, None, "name is not a string")]),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1', "", [("add", None, "before the call is")]),
        (HERMES, '<tool_call>\n{"name": "ad', "", [(None, None, "before the call is")]),
        (HERMES, "<tool_call>", "", [(None, None, "before the call is")]),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1}, None)]),
        (LLAMA, '{"name": "Lyon", "country": "France"}', '{"name": "Lyon", "country": "France"}', []),
        (LLAMA, "{1, 2} is a set.", "{1, 2} is a set.", []),
        (LLAMA, '{"name": "add", "parameters": {"a": ', "", [("add", None, "before the call is")]),
        (MISTRAL, f"[TOOL_CALLS] [{WEATHER}, {ADD}]", "", [WEATHER_CALL, ADD_CALL]),
        (MISTRAL, f" [{WEATHER}]", "", [WEATHER_CALL]),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            "",
            [("add", None, "not valid JSON")],
        ),
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
    assert all(seen == call.written for seen, call in zip(written, whole.calls, strict=True) if call.error is None)


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


@pytest.mark.parametrize("style", [HERMES, LLAMA, MISTRAL])
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
