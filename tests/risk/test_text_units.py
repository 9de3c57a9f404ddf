"""Words, claims and sentences of a text: what is cut where."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine.risk.claims import claim_ranges
from cocoa_engine.risk.sentences import sentence_ranges
from cocoa_engine.risk.words import word_ranges

TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("abAB zZ09 .,!?\n-*#`\"'“”’()$%/:·。、東京です ก हि é😀\u200d"), st.characters()
    ),
    max_size=60,
)


def words(text: str, cuts: tuple[int, ...] = ()) -> list[str]:
    return [text[start:end] for start, end in word_ranges(text, cuts)]


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_ranges(text)]


def claims(text: str, cuts: tuple[int, ...] = ()) -> list[tuple[str, str]]:
    return [(text[one.start : one.end], one.kind) for one in claim_ranges(text, cuts)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It cost $3.5 million, or 20%.", ["It", "cost", "$3.5", "million", "or", "20%"]),
        ("(well-known) “don’t” — yes/no", ["well-known", "don’t", "yes", "no"]),
        ("see www.a.example/b.c?d=1, or a.b@c.example.", ["see", "www.a.example/b.c?d=1", "or", "a.b@c.example"]),
        ("The U.S. used file.py and C++ at -5 °C.", ["The", "U.S", "used", "file.py", "and", "C++", "at", "-5", "C"]),
        ("end.Next sentence", ["end", "Next", "sentence"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("", []),
        (" ... !? ", []),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_words_without_spaces_are_the_tokens() -> None:
    text = "東京は日本の首都です。GDP"
    assert words(text, (2, 3, 5, 6, 8, 10, 11)) == ["東京", "は", "日本", "の", "首都", "です", "GDP"]
    assert words(text) == ["東京は日本の首都です", "GDP"]


@pytest.mark.parametrize(
    "parts",
    [
        ["Dr. Smith met J. K. Rowling at 10:30 a.m. on Monday.", "They left."],
        ["He moved to the U.S.", "The U.S. Army paid $3.5 million, e.g. for No. 10 (approx. 2.0.1).", "Why?", "No!"],
        ["Read www.example.com/a.b.", "It is long."],
        ["“Really?” she asked.", "“Yes.”", "Then what?", "maybe so."],
        ["東京は首都です。", "人口は多い！", "はい。"],
        ["यह है।", "वह है।"],
        ["The code `a. B` runs.", "It ends, etc.", "Then more."],
    ],
)
def test_sentences(parts: list[str]) -> None:
    joint = "" if parts[0][0] in "東" else " "
    assert sentences(joint.join(parts)) == parts


def test_sentences_of_markdown_lists_and_code() -> None:
    text = (
        "# Rivers. Of France\nHere they are:\n1. The Seine. It is in Paris.\n2. The Loire\n- **Rhône**: south\n\n"
        "A line that is\nwrapped here. Next.\n```python\nx = 1.\n\ny. Z\n```\n| a | b |\nEnd"
    )
    assert sentences(text) == [
        "# Rivers.",
        "Of France",
        "Here they are:",
        "1. The Seine.",
        "It is in Paris.",
        "2. The Loire",
        "- **Rhône**: south",
        "A line that is\nwrapped here.",
        "Next.",
        "```python\nx = 1.\n\ny. Z\n```",
        "| a | b |",
        "End",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The capital of France is Paris.", [("capital", "word"), ("France", "name"), ("Paris", "name")]),
        (
            "The Bank of England met King Charles III.",
            [("Bank of England", "name"), ("met", "word"), ("King Charles III", "name")],
        ),
        ("It was on 12 March 2014, not on May 3rd.", [("12 March 2014", "date"), ("May 3rd", "date")]),
        (
            "She said “to be or not” and paid 500 million.",
            [("said", "word"), ("to be or not", "quote"), ("paid", "word"), ("500 million", "number")],
        ),
        ("1. First rule\n2. Then two dogs", [("First", "word"), ("rule", "word"), ("two", "number"), ("dogs", "word")]),
        ("He is. They were, and so on!", []),
        (
            "Die Stadt an der Seine und an der Marne ist an der Oise.",
            [("Stadt", "name"), ("Seine", "name"), ("Marne", "name"), ("Oise", "name")],
        ),
    ],
)
def test_claims(text: str, found: list[tuple[str, str]]) -> None:
    assert claims(text) == found


def test_a_frequent_word_of_another_language_is_no_claim() -> None:
    text = "Talo oli sekä suuri sekä vanha sekä kaunis."
    assert "sekä" not in [word for word, _ in claims(text)]
    assert ("kaunis", "word") in claims(text)


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8))
def test_units_of_any_text_are_exact_and_in_order(text: str, cuts: list[int]) -> None:
    found = (word_ranges(text, cuts), sentence_ranges(text), [(one.start, one.end) for one in claim_ranges(text, cuts)])
    for ranges in found:
        assert all(0 <= start < end <= len(text) for start, end in ranges)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    for start, end in found[0]:
        assert (not text[start:end].isspace() and any(character.isalnum() for character in text[start:end])) or all(
            not character.isascii() for character in text[start:end]
        )
    covered = {at for start, end in found[1] for at in range(start, end)}
    assert all(character.isspace() for at, character in enumerate(text) if at not in covered)
    word_starts, word_ends = {start for start, _ in found[0]}, {end for _, end in found[0]}
    assert all(start in word_starts and end in word_ends for start, end in found[2])
