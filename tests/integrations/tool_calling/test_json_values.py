"""Paths and offsets of the values in complete and incomplete JSON."""

from __future__ import annotations

import json

import pytest

from cocoa_integrations.tool_calling.reading import MAX_DEPTH, field_offsets

TEXT = '{"person": {"name": "Zoë \\"Z\\"", "age": 42}, "items": [{"name": "tea"}, [1, null], ""], "it\'s": true}'


def texts(text: str) -> dict[str, str]:
    return {path: text[start:end] for path, (start, end) in field_offsets(text).items()}


def test_every_value_has_its_path_and_its_place() -> None:
    assert texts(TEXT) == {
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
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (' [1, "a"] ', {"$[0]": "1", "$[1]": "a"}),
        (' "a" ', {"$": "a"}),
        ("{}", {}),
        ("no JSON", {}),
        ("", {}),
        ('{"a b": {"c": 1}}', {"$['a b']": '{"c": 1}', "$['a b'].c": "1"}),
    ],
)
def test_other_texts(text: str, expected: dict[str, str]) -> None:
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
