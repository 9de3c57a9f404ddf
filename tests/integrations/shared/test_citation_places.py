"""Which source a part is cited from, and its marker: at the end of a clause, never inside what is read as one piece."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocoa_engine.errors import ConfigError
from cocoa_engine.report import RiskReport, SpanReport
from cocoa_engine.risk.claims import content_words
from cocoa_engine.risk.clauses import clauses
from cocoa_engine.risk.sentences import list_marks
from cocoa_engine.risk.words import Range, word_ranges
from cocoa_integrations._shared.citations import Citation, citations_of, citing, marker_edits, with_markers
from cocoa_integrations._shared.edits import EditedText
from tests.helpers.reports import stand_in, to_dicts

WORDS = ("tower", "was built", "Marta Lindqvist", "well-known", "don't", "塔は赤い", "torre", "برج", "Häuser", "हिन्दी")
PIECES = (
    *("3.14", "1,000", "10:30", "-5.5", "v1.2.3", "--mail-option", "-v", "file.py", "/etc/passwd", "C++"),
    *("https://x.org/a.b?c=d#e", "www.a.example", "a.b@c.example", "[text. More](https://x.y/z)", "&amp; then"),
    *("`a. B c`", "``x `y. Z` ``", "$$a. B$$", "(see p. 4. It)", "<b class='x. Y'>"),
    *('"It is red. It is old."', "“Yes. No.”", "„Es ist rot. Ja.“", "«Es rojo. Sí.»", "「是的。不。」", "'So. Yes.'"),
    *("Dr. Smith", "e.g. this", "U.S. Army", "J. K. Rowling", "z. B. Holz", "p. ej. uno", "am 3. Mai", "Sr. García"),
    *("No. 10", "vgl. Abb. 3", "at 10 a.m. Monday", "Ph.D. students"),
)
BLOCKS = ("\n```python\nx = 1. Y\n\ny; Z\n```\n", "\n~~~\nmake. It\n~~~\n")
LINES = ("\n", "\n\n", "\n- ", "\n1. ", "\n2. ", "\n# ", "\n> ")
ENDS = (". ", "! ", "? ", "; ", ", ", ": ", "。", "？", "؟ ", "؛ ", "… ", " — ", ".** ", '." ')
ROW = "\n| Old. Red | `a | b` 41 m. |\n|---|---|\n"


@st.composite
def cited_texts(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]], list[Citation]]:
    """A text, the ranges of its pieces, and citations of any parts of it."""
    kinds = st.one_of(*map(st.sampled_from, (WORDS, WORDS, PIECES, ENDS, LINES, (*BLOCKS, ROW))))
    text, pieces = "", list[tuple[int, int]]()
    for fragment in draw(st.lists(kinds, max_size=14)):
        if fragment in PIECES and text and not text[-1].isspace():
            text += " "
        start = len(text)
        text += fragment if fragment in (*ENDS, *LINES) else f"{fragment} "
        if fragment in (*PIECES, *BLOCKS):
            pieces.append((text.index(fragment.strip(), start), start + len(fragment.rstrip())))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    citations = [
        Citation(source=draw(st.integers(1, 3)), id=None, start=start, end=end, text=text[start:end], spans=[])
        for start, end in itertools.pairwise(cuts)
        if draw(st.booleans())
    ]
    return text, pieces, citations


def marked(text: str, citations: list[Citation]) -> str:
    for edit in reversed(marker_edits(text, citations)):
        text = text[: edit.start] + edit.after + text[edit.start :]
    return text


def cited_words(text: str, citation: Citation, words: list[Range]) -> list[str]:
    shared = (text[max(word.start, citation.start) : min(word.end, citation.end)] for word in words)
    return [part for part in shared if any(map(str.isalnum, part))]


@given(cited_texts())
@settings(max_examples=300)
def test_markers_of_any_text(cited: tuple[str, list[tuple[int, int]], list[Citation]]) -> None:
    text, pieces, citations = cited
    edits = marker_edits(text, citations)
    places = [edit.start for edit in edits]
    assert places == sorted(set(places))  # at most one group at a place, in order
    for edit in edits:
        place = edit.start
        assert (edit.end, edit.text, edit.before) == (place, None, None)
        is_line = edit.after.endswith("\n")  # before a block of code at the beginning
        assert re.fullmatch(r"(\[\d\])+\n" if is_line else r" (\[\d\])+", edit.after)
        assert not is_line or text[place:].startswith(("```", "~~~"))
        numbers = [int(number) for number in re.findall(r"\d", edit.after)]
        assert numbers == sorted(set(numbers))
        assert not any(start < place < end for start, end in pieces)
        assert not any(start < place <= end for start, end in pieces if text[start:end][:3] in ("```", "~~~")), (
            "a fence that is followed by a marker is not closed"
        )
        if not is_line:
            assert not text[:place][-1:].isspace()
            assert not (text[:place][-1:].isalnum() and text[place : place + 1].isalnum())
            line = text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0]
            if line.startswith("|"):
                assert re.match(r"[.\s]*(\||$)", text[place:])
    for part in clauses(text):
        assert sum(part.start < place <= part.end for place in places) <= 1
    sources = {int(number) for edit in edits for number in re.findall(r"\d", edit.after)}
    assert sources >= {one.source for one in citations if cited_words(text, one, content_words(text))}
    assert sources <= {one.source for one in citations if cited_words(text, one, word_ranges(text))}
    # every clause of a text that is cited as a whole has a marker
    places = [edit.start for edit in marker_edits(text, [citation(text, text, 1)])]
    marks = list_marks(text)
    for part in clauses(text):
        words = [word for word in word_ranges(text) if part.start <= word.start < part.end]
        words = [word for word in words if not any(mark.start <= word.start < mark.end for mark in marks)]
        has_words = any(any(map(str.isalnum, text[word.start : word.end])) for word in words)
        assert part.is_code or not has_words or any(part.start < place <= part.end for place in places)


@given(st.text(st.one_of(st.characters(), st.sampled_from("aB1.;:!。\"'“”`|\n -*#()[]$<&~\\")), max_size=60), st.data())
@settings(max_examples=300)
def test_markers_of_any_characters(text: str, data: st.DataObject) -> None:
    offsets = st.integers(0, len(text))
    start, end = sorted(data.draw(st.tuples(offsets, offsets)))
    cited = Citation(source=1, id=None, start=start, end=end, text=text[start:end], spans=[])
    places = [edit.start for edit in marker_edits(text, [cited])]
    assert places == sorted(set(places))
    assert all(0 <= place <= len(text) for place in places)
    assert not any(text[:place][-1:].isalnum() and text[place : place + 1].isalnum() for place in places)
    assert bool(places) >= bool(cited_words(text, cited, content_words(text)))
    assert bool(places) <= bool(cited_words(text, cited, word_ranges(text)))


def citation(text: str, part: str, source: int) -> Citation:
    start = text.index(part)
    return Citation(source=source, id=None, start=start, end=start + len(part), text=part, spans=[])


@pytest.mark.parametrize(
    ("text", "cited", "shown"),
    [
        # a part in the middle, and one that begins or ends inside of a clause
        ("The --mail option sends a report.", {"The --mail": 1}, "The --mail option sends a report [1]."),
        ("The tower is old. It is red.", {" is old. It": 1}, "The tower is old [1]. It is red."),
        # several sources
        ("The tower is old and red.", {"old": 2, "red": 1}, "The tower is old and red [1][2]."),
        ("The tower is old. It is red.", {"old": 1, "red": 1}, "The tower is old [1]. It is red [1]."),
        ("The tower is old; it is red.", {"old": 1, "red": 2}, "The tower is old [1]; it is red [2]."),
        ("The tower is old. It is red.", {"is old. It is red": 3}, "The tower is old [3]. It is red [3]."),
        # no content
        ("The tower is old.", {".": 1}, "The tower is old."),
        ("The tower is old.", {" is": 1}, "The tower is old."),
        ("The tower is old.  \n", {"old.  \n": 1}, "The tower is old [1].  \n"),
        # what a full stop does not end
        ("Pi is 3.14. So what?", {"3": 1}, "Pi is 3.14 [1]. So what?"),
        ("Dr. Smith left at 10 a.m. on Monday.", {"Dr": 1}, "Dr. Smith left at 10 a.m. on Monday [1]."),
        ("Trees, e.g. Oaks, grow. So.", {"Trees": 1}, "Trees, e.g. Oaks, grow [1]. So."),
        ("He went to the U.S. Then he left.", {"went": 1}, "He went to the U.S. [1] Then he left."),
        ("Dr. Who left at 5 p.m. It is old.", {"left": 1}, "Dr. Who left at 5 p.m. [1] It is old."),
        ("Tall trees, e.g.\nOld houses, i.e.", {"trees": 1, "Old": 2}, "Tall trees, e.g. [1]\nOld houses, i.e. [2]"),
        ("It orbits the Sun. He sat.", {"Sun": 1, "sat": 2}, "It orbits the Sun [1]. He sat [2]."),
        ("No. It is red.", {"No": 1, "red": 2}, "No [1]. It is red [2]."),
        ("See https://x.org/a.b?c=d. Then go.", {"x.org": 1}, "See https://x.org/a.b?c=d [1]. Then go."),
        ("Run `make. Then` now! Go.", {"make": 1}, "Run `make. Then` now [1]! Go."),
        (
            'He said "It is red. It is old." Then he left.',
            {"red": 1},
            'He said "It is red. It is old." [1] Then he left.',
        ),
        ("A tower (see p. 4. It) is red.", {"tower": 1}, "A tower (see p. 4. It) is red [1]."),
        # Markdown
        ("Run this:\n```\nmake. Now\n```\nDone.", {"make": 1}, "Run this [1]:\n```\nmake. Now\n```\nDone."),
        ("Run this:\n```\nmake install", {"install": 1}, "Run this [1]:\n```\nmake install"),
        ("```\nmake\n```\nDone.", {"make": 1}, "[1]\n```\nmake\n```\nDone."),
        ("1. Red\n2. Old.\n3.", {"Red": 1, "Old": 1, "3": 2}, "1. Red [1]\n2. Old [1].\n3."),
        ("- **Red**: a colour\n- Old", {"Red": 1}, "- **Red**: a colour [1]\n- Old"),
        ("# Towers\nOld. **Red.** Tall", {"Towers": 1, "Red": 2}, "# Towers [1]\nOld. **Red.** [2] Tall"),
        ("| Red. Old | 41 m |\n|---|---|", {"Red": 1, "41": 2}, "| Red. Old [1] | 41 m [2] |\n|---|---|"),
        ("red | old\n--- | :-:", {"red": 1, "old": 2}, "red [1] | old [2]\n--- | :-:"),
        (
            "Both:\n\nred. Big | old\n---|---\na tower | a wall\n1 | 2 |\n\nred | old",
            {"Big": 1, "old": 2, "tower | a wall": 1, "1": 2, "2 |": 1, "\n\nred | old": 3},
            "Both:\n\nred. Big [1] | old [2]\n---|---\na tower [1] | a wall [1]\n1 [2] | 2 [1] |\n\nred | old [3]",
        ),
        (
            "A tower that was built of very old and very red bricks by\nMarta.",
            {"tower": 1},
            "A tower that was built of very old and very red bricks by\nMarta [1].",
        ),
        # other languages
        ("塔是红色的。它很高！", {"红色": 1, "很高": 2}, "塔是红色的 [1]。它很高 [2]！"),
        (
            "Él dijo: «Es rojo. Sí.» ¿Es alto? Sí.",
            {"rojo": 1, "alto": 2},
            "Él dijo: «Es rojo. Sí.» [1] ¿Es alto [2]? Sí.",
        ),
        ("هل البرج قديم؟ البرج أحمر.", {"قديم": 1, "أحمر": 2}, "هل البرج قديم [1]؟ البرج أحمر [2]."),
        (
            "Am 3. Mai kam z. B. Dr. Berg, vgl. Abb. 3. Ende.",
            {"Berg": 1, "Ende": 2},
            "Am 3. Mai kam z. B. Dr. Berg, vgl. Abb. 3 [1]. Ende [2].",
        ),
        ("Er sagte: „Der Turm ist rot.“ Dann ging er.", {"Turm": 1}, "Er sagte: „Der Turm ist rot.“ [1] Dann ging er."),
        # an answer that was cut off
        ("The keeper was Jonas Ber", {"Ber": 1}, "The keeper was Jonas Ber [1]"),
    ],
)
def test_places(text: str, cited: dict[str, int], shown: str) -> None:
    assert marked(text, [citation(text, part, source) for part, source in cited.items()]) == shown


def entries(*texts: str) -> list[SpanReport]:
    starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
    return [
        SpanReport(start=start, end=start + len(text), text=text, kind="greedy", risk=0.1, log_prob=-1.0)
        for start, text in zip(starts, texts, strict=True)
    ]


def test_the_source_that_raised_a_part_most() -> None:
    spans = entries("The tower", " of Hald", "en", " is", " old.", "")
    lifts = [[0.1, 0.2], [2.0, 0.5], [1.0, None], [0.0, 0.0], [-1.0, 3.0], [5.0, 5.0]]
    citations, spans = citations_of(spans, lifts, 1.0)
    assert [(one.source, one.text, one.lift, one.spans) for one in citations] == [
        (1, " of Halden", 3.0, [1, 2]),
        (2, " old.", 3.0, [4]),
    ]
    assert [span.source for span in spans] == [None, 1, 1, None, 2, None]
    assert spans[2].source_lifts == [1.0, None]


def test_neighbours_with_one_source_are_one_citation() -> None:
    spans = entries("The tower", " is old", " and red", ".")
    citations, _ = citations_of(spans, [[2.0], [3.0], [0.0], [4.0]], 1.0)
    assert [(one.start, one.end, one.lift) for one in citations] == [(0, 16, 5.0), (24, 25, 4.0)]


@pytest.mark.parametrize("lifts", [[[], []], [[None], [None]], [[0.5], [0.9]]])
def test_no_source(lifts: list[list[float | None]]) -> None:
    assert citations_of(entries("The", " tower"), lifts, 1.0)[0] == []


def test_markers_move_the_offsets() -> None:
    spans = entries("The tower ", "is old.", " Yes", "")
    citations, spans = citations_of(spans, [[2.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]], 1.0)
    change = with_markers(EditedText("The tower is old. Yes"), citations, RiskReport.of_spans(spans))
    text, spans, citations = change.text, change.moved(spans), change.moved(citations)
    assert text == "The tower is old [1][2]. Yes"
    assert stand_in(text, to_dicts(spans))
    assert stand_in(text, to_dicts(citations))
    assert spans[-1].start == len(text)


@pytest.mark.parametrize("value", ["1", True, float("nan")])
def test_the_lowest_lift_is_a_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="min_lift takes a finite number"):
        citing(None, value, None)
