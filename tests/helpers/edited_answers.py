"""Random answers, and what holds of their reports after any steps that change their texts."""

import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

OPENINGS, CLOSINGS, REDACTED = "\ue000\ue001\ue002", "\ue010\ue011\ue012", "\ue020"
MARKS = [f"{opens}{{text}}{closes}" for opens, closes in zip(OPENINGS, CLOSINGS, strict=True)]
TOKENS = re.compile(rf"[{OPENINGS}{CLOSINGS}]| ?\[\d+\] ?")
"""What marks and markers add. No random text has any of it."""

TEXTS = st.text(st.sampled_from("aB é\n.,-7x日本́😀 ''"), max_size=6) | st.sampled_from(
    ["", " ", "\n\n", " The", " tower", " of Hald", "en", " is", " 41", " metres", ".", " It"]
)
TEXTS |= st.sampled_from(
    ["`", " `run. It`", "\n```\n", "\nx | y\n---|---\n", " | ", " $a", "$", " <b>", "\n1. ", "; ", "!"]
)
SPANS = st.lists(st.tuples(TEXTS, st.sampled_from([0.1, 0.4, 0.6, 0.9])), max_size=9)
VALUES = st.lists(st.lists(st.sampled_from([None, -1.0, 0.5, 2.0]), min_size=3, max_size=3), min_size=30, max_size=30)


def redact(text: str, _: dict[str, Any]) -> str:
    """A mark that hides a text."""
    return REDACTED * 3


def squeezed(text: str) -> str:
    """A text without marks, markers and white space."""
    return "".join(TOKENS.sub("", text).split())


def assert_offsets_follow(
    text: str, entries: Sequence[dict[str, Any]], *, begin: int = 0, ordered: bool = True
) -> None:
    """The text at the offsets of each entry is its own, unless it was redacted.

    Args:
        text: the text that is shown.
        entries: those that belong to it.
        begin: the offset of its first character.
        ordered: whether they are in the order of the text.
    """
    places = [(max(one["start"] - begin, 0), one["end"] - begin) for one in entries]
    assert all(0 <= start <= max(end, 0) <= len(text) for start, end in places), places
    if ordered:
        assert places == sorted(places)
        assert sorted(end for _, end in places) == [end for _, end in places]
    for (start, end), one in zip(places, entries, strict=True):
        stretch = text[start : max(end, 0)]
        assert not is_in_mark(stretch)  # the offsets are those of the text inside of the mark
        if "text" not in one or REDACTED in stretch:
            continue
        if not TOKENS.search(stretch) and one["start"] >= begin:
            assert stretch.strip() == one["text"].strip()
            continue
        assert squeezed(one["text"]).endswith(squeezed(stretch)) if one["start"] < begin else True
        if one["start"] >= begin:
            assert squeezed(stretch) == squeezed(one["text"])


def assert_nested(text: str) -> None:
    """Every mark that is opened is closed, the last one first, and no marker of a citation stands inside of one."""
    opened = []
    for char in text:
        if char in OPENINGS:
            opened.append(OPENINGS.index(char))
        elif char in CLOSINGS:
            assert opened.pop() == CLOSINGS.index(char)
        assert char != "[" or not opened
    assert not opened


def is_in_mark(stretch: str) -> bool:
    """Whether a stretch of a text begins with a mark that ends with it."""
    depth = 0
    for number, char in enumerate(stretch):
        depth += (char in OPENINGS) - (char in CLOSINGS)
        if depth <= 0:
            return bool(stretch) and stretch[0] in OPENINGS and number == len(stretch) - 1
    return False
