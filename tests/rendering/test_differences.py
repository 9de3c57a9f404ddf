"""Word-by-word differences between answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine.rendering.highlights import differences

WORDS = st.lists(st.sampled_from(["the", " ", "\n", "sea", "日", "本", ".", "é", " a"]), max_size=12).map("".join)


def marked(*texts: str) -> list[list[str]]:
    found = differences(texts)
    return [[text[start:end] for start, end in ranges] for text, ranges in zip(texts, found, strict=True)]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("It is Paris.", "It is Rome."), [["Paris"], ["Rome"]]),
        (("It is  Paris.", "It\nis Paris."), [[], []]),
        (("", "Paris."), [[], ["Paris."]]),
        (("in the old town", "in town"), [["the old"], []]),
        (("東京は首都", "京都は首都"), [["東"], ["都"]]),
        (("a b c", "a x c", "a b y"), [["b c"], ["x"], ["y"]]),
        (("alone",), [[]]),
    ],
)
def test_differing_words(texts: tuple[str, ...], expected: list[list[str]]) -> None:
    assert marked(*texts) == expected


@given(WORDS, WORDS)
def test_what_is_not_marked_is_the_same(one: str, other: str) -> None:
    rest = []
    for text, ranges in zip((one, other), differences((one, other)), strict=True):
        for start, end in reversed(ranges):
            text = text[:start] + text[end:]
        rest.append("".join(text.split()))
    assert rest[0] == rest[1]
