"""What is drawn in a terminal, in colour and without, for texts that rich or a terminal could misread."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import Candidate, Generation
from cocoa_engine.rendering.highlights import Range, RiskScale, differences, marked, pieces
from cocoa_engine.rendering.terminal import (
    STYLES,
    Comparison,
    answer_text,
    legend,
    report,
    risk_point_table,
    spans_text,
)
from cocoa_engine.rendering.wording import NOT_CALIBRATED, finding
from cocoa_engine.risk import Check
from cocoa_engine.safe_text import safe
from tests.helpers.drawn import drawn
from tests.helpers.made_up_answers import figures, generation, stopped

LEVELS = generation(
    *(("It is", 0.99), (" low", 0.20), (",", 0.95), (" mild", 0.30)), (" raised", 0.60), (" high", 0.90), (".", 0.99)
)


def test_the_riskiest_claims_have_the_style_of_their_level_and_nothing_else_has() -> None:
    rendered = answer_text(LEVELS)
    assert rendered.plain == "It is low, mild raised high."
    styled = {str(span.style): rendered.plain[span.start : span.end] for span in rendered.spans if span.style}
    assert styled == dict(zip(STYLES[1:], ("mild", "raised", "high"), strict=True))
    assert STYLES[1:] == ("underline", "#000000 on #ffd75f", "bold #ffffff on #c00000")


def test_the_verdict_comes_first_and_the_claims_to_check_beneath() -> None:
    lines = drawn(report([LEVELS], marks=True)).splitlines()
    assert " ".join(lines[:2]).split() == f'The model was unsure about "high". {NOT_CALIBRATED}'.split()
    assert lines[-4:] == [
        "Check these:",
        "1. high (0.90): the model was unsure",
        "2. raised (0.60): the model was unsure",
        "3. mild (0.30): the model was unsure",
    ]
    assert "fMLDS" not in "".join(lines)  # only among the details
    whole = LEVELS.model_copy(update={"answer_risk": 0.714, "calibrated_on": "questions about a passage"})
    assert whole.verdict == "Whole answer: 71 % likely wrong; calibrated on questions about a passage."
    first = drawn(report([whole])).splitlines()[0]
    assert first.strip() == "Whole answer: 71 % likely wrong; calibrated on questions about a passage."
    unlike = " ".join(drawn(report([whole.model_copy(update={"answer_out_of_domain": True})])).split())
    assert "about a passage. This answer is unlike those, so the probability may be unreliable." in unlike
    raw = generation(("It is", 0.4), (" low", 3.1), risk_source="f_mlds")
    raw = raw.model_copy(update={"answer_risk": 0.714})
    assert raw.verdict == f"Whole answer: 71 % likely wrong. {finding(raw)}"
    assert "not probabilities" in raw.verdict


def test_a_claim_has_one_colour_in_any_view() -> None:
    """No scale is relative to the texts beside it."""
    alone = answer_text(LEVELS, marks=True).plain
    assert alone == "It is low, [mild|1] [raised|2] [high|3]."
    other = generation(("It is low, mild raised high", 0.1), (" now", 0.95))
    beside = Comparison([LEVELS, other], marks=True).answers[0].plain
    assert beside.replace("{", "").replace("}", "") == alone
    shorter = LEVELS.model_copy(update={"spans": LEVELS.spans[:4], "text": "It is low, mild"})
    assert answer_text(shorter, marks=True).plain == "It is low, [mild|1]"


def test_a_raw_mlds_has_no_levels() -> None:
    raw = generation(("all", 0.8), (" alike", 0.9), risk_source="f_mlds")
    assert answer_text(raw, marks=True).plain == "all alike"
    words = " ".join(drawn(report([raw], table=True)).split())
    assert "layers of the model disagree; they are not probabilities, so nothing is shaded. Not calibrated" in words
    assert "it has no levels" in words
    for document in (words, raw.to_html(), raw.render("markdown")):
        assert "Check these" not in document
        assert "stands out" not in document  # which no raw MLDS can tell


@given(risk=st.one_of(st.floats(0, 1), st.just(math.nan)))
def test_levels_are_fixed_steps(risk: float) -> None:
    scale = RiskScale()
    assert scale.level(risk) == (3 if math.isnan(risk) else min(int(risk * 4), 3))
    assert scale.level(None) == 0
    assert RiskScale(absolute=False).level(risk) == 0
    assert scale.ranges == ["0.00–0.25", "0.25–0.50", "0.50–0.75", "0.75–1.00"]


def test_details_have_every_span_and_sentence() -> None:
    shown = drawn(report([LEVELS], table=True, marks=True))
    assert "[It is|3] low[,|3] [mild|1] [raised|2] [high|3][.|3]" in shown
    assert "██████░░░░ 0.60 It is low, mild raised high." in shown
    assert "cocoa-sig: 7 tokens, 7 spans" in shown


def test_the_span_that_reached_max_risk_is_marked_whatever_its_level() -> None:
    answer = stopped(("Dune", 0.2), (" is", 0.1))
    assert answer_text(answer, marks=True).plain == "Dune [is|0!]"
    assert "! reached max_risk" in drawn(report([answer], marks=True))
    coloured = answer_text(answer)
    assert coloured.plain == answer.text
    style = next(str(span.style) for span in coloured.spans if coloured.plain[span.start : span.end] == "is")
    assert style not in STYLES
    assert style in {str(span.style) for span in legend(answer).spans}
    assert answer_text(stopped(("Dune", 0.9), ("", 0.8)), marks=True).plain.endswith("[(end)|0!]")
    assert "{[is|0!]}" in drawn(Comparison([answer, generation(("Dune", 0.9))], marks=True))
    assert "max_risk" not in drawn(report([LEVELS], table=True, marks=True))
    assert spans_text(answer.spans, marks=True).plain == "Dune [is|0!]"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[bold]not markup[/bold] [/] [link=x]",
        ":smile: 🙂 👩‍👩‍👧 🇦🇺",
        "שלום עולם, مرحبا بالعالم",
        "日本語のテキストがここにありますそしてもっと続きます",
        "def f(x):\n\treturn [x]\n",
    ],
)
@pytest.mark.parametrize("width", [24, 80])
def test_text_is_drawn_as_it_is(text: str, width: int) -> None:
    answer = generation(("Xylophone ", 0.1), (text, 0.9), (" y", 0.8))
    assert answer_text(answer).plain == "Xylophone " + text + " y"
    shown = drawn(answer_text(answer), width)
    assert "".join(shown.split()) == "".join(("Xylophone" + text + "y").split())
    assert "\x1b[" in drawn(answer_text(answer), width, color=True)


def test_words_are_not_torn_at_narrow_widths() -> None:
    answer = generation(("The quick brown fox", 0.8), (" jumps over the lazy", 0.9), (" dog", 0.85))
    for width in range(8, 40):
        lines = drawn(answer_text(answer), width).splitlines()
        assert " ".join(" ".join(lines).split()) == answer.text
        assert max(map(len, lines)) <= width


def test_where_all_is_alike_nothing_is_shaded() -> None:
    alike = generation(("Paris", 0.9), (" shines", 0.9))
    shown = drawn(report([alike], marks=True))
    assert "Paris shines" in shown
    assert "|" not in shown
    for document in (shown, alike.to_html(), alike.to_markdown()):
        assert "No claim of this answer stands out." in document
        assert "Check these" not in document


CANDIDATES = [
    Candidate(**figures(" in water\n", 0.9, -2.25, -7.5), is_greedy=False),
    Candidate(**figures(" [red]", 0.8, -1.5, -8.25), is_greedy=True),
    Candidate(**figures("", 0.7, -3.0, -9.0), is_greedy=False),
]
RISKY = generation(("Sound travels faster", 0.8), (" in water\n", 0.9), candidates=CANDIDATES)


def test_table_shows_every_candidate_with_its_figures() -> None:
    rows = [line.split() for line in drawn(risk_point_table(RISKY)).splitlines()]
    assert rows[0] == ["#", "candidates", "log", "p", "ConMLDS", "fMLDS", "score", "taken"]
    assert rows[2] == ["1", "after", "“Sound", "travels", "faster”"]
    assert rows[3] == ["␣in", "water\\n", "-2.25", "0.020", "0.900", "-7.50", "kept"]
    assert rows[4] == ["␣[red]", "-1.50", "0.020", "0.800", "-8.25", "greedy"]
    assert rows[5] == ["(end)", "-3.00", "0.020", "0.700", "-9.00"]
    same = generation((" water", 0.9), candidates=[Candidate(**figures(" water"), is_greedy=True)])
    assert drawn(risk_point_table(same)).splitlines()[3].split()[-1] == "both"


def test_narrow_terminals_are_filled_and_every_figure_is_whole() -> None:
    for width in (44, 60, 200):
        shown = drawn(risk_point_table(RISKY), width)
        assert max(map(len, shown.splitlines())) <= width
        for figure in ("-2.25", "0.020", "0.900", "-7.50", "kept", "greedy", "-9.00"):
            assert figure in shown
    for width in (24, 40):
        shown = drawn(report([RISKY, LEVELS], table=True, marks=True), width)
        assert max(map(len, shown.splitlines())) <= width


FIRST = generation(("Sound travels", 0.1), (" faster in water.", 0.9))
OTHER = generation(("Sound travels faster in", 0.2), (" wood.", 0.9), method="greedy")


def test_a_comparison_stands_side_by_side_with_its_verdicts_first_and_its_differences_marked() -> None:
    lines = drawn(Comparison([FIRST, OTHER], marks=True), 280).splitlines()
    assert lines[0].split() == ["cocoa-sig", "greedy"]
    assert lines[1].count("The model was unsure about") == 2
    texts = " ".join(lines[3].split())
    assert texts == "Sound travels [faster|3] in {[water|3]}. Sound travels faster in {[wood|3]}."
    assert lines[5].count("Check these:") == 2


def test_a_claim_that_differs_in_part_has_the_braces_inside() -> None:
    first = generation(("The", 0.1), (" post-World", 0.9), (" era", 0.1))
    other = generation(("The", 0.1), (" pre-war", 0.1), (" era", 0.1))
    assert Comparison([first, other], marks=True).answers[0].plain == "The [{post}-{World}|3] era"


@st.composite
def marked_answers(draw: st.DrawFn) -> tuple[Generation, list[Check], list[Range]]:
    """An answer, claims to check, and ranges that differ; the claims and the ranges may cut each other."""
    text = draw(st.text(alphabet="ab -\n\x1c", min_size=1, max_size=16))

    def ranges() -> list[Range]:
        at = draw(st.lists(st.integers(0, len(text)), unique=True, max_size=8).map(sorted))
        return list(zip(at[::2], at[1::2], strict=False))

    risks = st.sampled_from([0.1, 0.3, 0.6, 0.9])
    checks = [Check(text=text[start:end], start=start, end=end, risk=draw(risks)) for start, end in ranges()]
    at = draw(st.integers(0, len(text)))
    answer = draw(st.sampled_from([generation, stopped]))((text[:at], 0.1), (text[at:], 0.8))
    return answer, draw(st.permutations(checks)), ranges()


@given(marked_answers())
def test_brackets_and_braces_nest(made: tuple[Generation, list[Check], list[Range]]) -> None:
    answer, checks, differing = made
    text = marked(pieces(answer, checks, RiskScale(), differing))
    opened: list[str] = []
    in_braces: list[bool] = []  # of each character of the answer
    for one in re.findall(r"[{}\[]|\|\d?!?\]|.", text, re.DOTALL):
        if one in ("{", "["):
            assert one not in opened
            opened.append(one)
        elif one in ("}", "]") or len(one) > 1:
            assert opened.pop() == ("{" if one == "}" else "[")
        else:
            in_braces.append("{" in opened)
    assert not opened
    assert "".join(re.findall(r"[ab\s\u241c-]", text)) == safe(answer.text)
    for at, one in enumerate(safe(answer.text)):
        if not one.isspace():
            assert in_braces[at] == any(low <= at < high for low, high in differing)


def test_a_comparison_in_colour_dims_what_the_answers_share() -> None:
    first, other = Comparison([FIRST, OTHER]).answers
    assert first.plain == FIRST.text
    assert other.plain == OTHER.text
    dim = "".join(other.plain[span.start : span.end] for span in other.spans if "dim" in str(span.style))
    assert "".join(dim.split()) == "Soundtravelsfasterin."
    (differing,) = (span for span in first.spans if first.plain[span.start : span.end] == "water")
    assert str(differing.style) == "bold #ffffff on #c00000"


def test_a_comparison_too_wide_for_the_terminal_stands_one_below_the_other() -> None:
    shown = drawn(Comparison([FIRST, OTHER], marks=True), 50)
    assert max(map(len, shown.splitlines())) <= 50
    assert [" ".join(part.split()) for part in shown.split("\n\n")] == [
        f'cocoa-sig The model was unsure about "faster". {NOT_CALIBRATED}',
        "Sound travels [faster|3] in {[water|3]}.",
        "Check these: 1. faster (0.90): the model was unsure 2. water (0.90): the model was unsure",
        f'greedy The model was unsure about "wood". {NOT_CALIBRATED}',
        "Sound travels faster in {[wood|3]}.",
        "Check these: 1. wood (0.90): the model was unsure",
    ]


def test_reports_of_equal_answers_and_of_an_empty_one() -> None:
    assert "The answers are the same." in drawn(report([FIRST, FIRST.model_copy()]))
    assert "The answers are the same." not in drawn(report([FIRST, OTHER]))
    shown = drawn(report([generation()], table=True), 200)
    assert "There is nothing to measure in this answer." in shown
    assert "cocoa-sig: 0 tokens, 0 spans, 0 risk points, 5 forward passes, ended by the model." in shown


WORDS = st.lists(st.sampled_from(["the", " ", "\n", "sea", "日", "本", ".", "é", " a"]), max_size=12).map("".join)


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
    ranges = differences(texts)
    assert [[text[start:end] for start, end in each] for text, each in zip(texts, ranges, strict=True)] == expected


@given(WORDS, WORDS)
def test_what_is_not_marked_is_the_same(one: str, other: str) -> None:
    rest = []
    for text, ranges in zip((one, other), differences((one, other)), strict=True):
        for start, end in reversed(ranges):
            text = text[:start] + text[end:]
        rest.append("".join(text.split()))
    assert rest[0] == rest[1]
