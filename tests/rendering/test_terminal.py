"""What is drawn in a terminal, in colour and without, for texts that rich or a terminal could misread."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from cocoa_engine import Candidate, CocoaEngine
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.terminal import STYLES, Comparison, answer_text, legend, report, risk_point_table
from tests.helpers.made_up_answers import figures, generation, stopped

LEVELS = generation((" low", 0.80), (" mild", 0.83), (" raised", 0.86), (" high", 0.90))


def drawn(renderable: RenderableType, width: int = 80, color: bool = False) -> str:
    system = "truecolor" if color else None
    console = Console(file=io.StringIO(), width=width, color_system=system, force_terminal=True, no_color=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def styles(text: str, style: str) -> list[str]:
    """The pieces of the answer that are drawn in a style."""
    rendered = answer_text(LEVELS)
    assert rendered.plain == text
    return [text[span.start : span.end] for span in rendered.spans if span.style == style]


def test_each_level_has_its_style_and_white_space_none() -> None:
    text = " low mild raised high"
    assert styles(text, "underline") == ["mild"]
    assert styles(text, "#000000 on #ffd75f") == ["raised"]
    assert styles(text, "bold #ffffff on #c00000") == ["high"]


def test_marks_replace_colour() -> None:
    assert answer_text(LEVELS, marks=True).plain == " low [mild|1] [raised|2] [high|3]"


def test_raw_risk_is_shown_relative_to_the_text_and_the_legend_says_so() -> None:
    words = " ".join(drawn(legend(LEVELS)).split())
    assert "raw fMLDS, not a probability, relative to this text's own range" in words
    assert "0.800–0.825 0.825–0.850 0.850–0.875 0.875–0.900" in words
    assert "raw ConMLDS" in legend(LEVELS.model_copy(update={"config": LEVELS.config.replace(metric="con_mlds")})).plain


def test_calibrated_risk_is_shown_on_an_absolute_scale_and_the_legend_says_so() -> None:
    calibrated = generation(("sure", 0.10), (" doubtful", 0.30), calibrated=True)
    assert answer_text(calibrated, marks=True).plain == "sure [doubtful|1]"
    words = legend(calibrated).plain
    assert "calibrated" in words
    assert "relative" not in words
    assert "0.000–0.250" in words


def test_a_span_that_cannot_be_seen_does_not_stretch_the_scale() -> None:
    ended = generation(("low", 0.8), (" high", 0.9), ("", 5.0))
    assert answer_text(ended, marks=True).plain == "low [high|3]"


def test_equal_risks_are_not_painted() -> None:
    alike = generation(("all", 0.9), (" alike", 0.9))
    assert answer_text(alike, marks=True).plain == "all alike"
    assert "0.900 throughout" in legend(alike).plain


def test_risks_that_only_rounding_tells_apart_are_not_painted() -> None:
    first = generation(("all", 1.0563), (" alike", 1.0563 + 1e-7))
    other = generation(("all", 1.0563 + 2e-7), (" alike", 1.0563), method="greedy")
    assert answer_text(first, marks=True).plain == "all alike"
    assert "1.056 throughout" in legend(first).plain
    one, two = Comparison([first, other]).answers
    assert one.spans == two.spans


@given(low=st.floats(0, 2), width=st.floats(0, 0.1))
def test_every_level_that_is_drawn_has_ends_that_differ_in_the_legend(low: float, width: float) -> None:
    scale = RiskScale.of(generation(("one", low), (" other", low + width)).spans)
    assert bool(scale.ranges) == bool(scale.level(scale.high))
    for shown in scale.ranges:
        start, end = shown.split("–")
        assert start != end


def test_spans_that_are_nearly_alike_are_not_painted_as_if_one_stood_out() -> None:
    alike = generation(("Paris", 0.9035), (" it", 0.9053), (" is", 0.9041))
    assert answer_text(alike, marks=True).plain == "Paris it is"
    assert "0.903–0.908" in legend(alike).plain
    assert answer_text(generation(("Paris", 0.875), (" it", 0.9)), marks=True).plain == "Paris [it|3]"


def test_the_span_that_reached_max_risk_is_marked_whatever_its_level() -> None:
    answer = stopped(("Dune", 0.9), (" is", 0.8))
    assert answer_text(answer, marks=True).plain == "[Dune|3] [is|0!]"
    assert "! reached max_risk" in legend(answer, marks=True).plain
    coloured = answer_text(answer)
    assert coloured.plain == answer.text
    style = next(str(span.style) for span in coloured.spans if coloured.plain[span.start : span.end] == "is")
    assert style not in STYLES
    assert style in {str(span.style) for span in legend(answer).spans}
    assert answer_text(stopped(("Dune", 0.9), ("", 0.8)), marks=True).plain == "Dune[(end)|0!]"
    assert "{[is|0!]}" in drawn(Comparison([answer, generation(("Dune", 0.9))], marks=True))
    assert "max_risk" not in legend(LEVELS, marks=True).plain


def test_scale_of_both_texts_when_compared() -> None:
    other = generation(("other", 0.95), method="greedy")
    shared = RiskScale.of([*LEVELS.spans, *other.spans])
    assert (shared.low, shared.high, shared.calibrated) == (0.80, 0.95, False)
    assert "relative to the range of these texts" in legend(LEVELS, scale=shared).plain


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
    answer = generation(("x ", 0.8), (text, 0.9))
    assert answer_text(answer).plain == "x " + text
    shown = drawn(answer_text(answer), width)
    assert "".join(shown.split()) == "".join(("x" + text).split())
    assert "\x1b[" in drawn(answer_text(answer), width, color=True) or not text


def test_words_are_not_torn_at_narrow_widths() -> None:
    answer = generation(("The quick brown fox", 0.8), (" jumps over the lazy", 0.9), (" dog", 0.85))
    for width in range(8, 40):
        lines = drawn(answer_text(answer), width).splitlines()
        assert " ".join(" ".join(lines).split()) == answer.text
        assert max(map(len, lines)) <= width


def test_a_model_cannot_command_the_terminal() -> None:
    attack = generation(("ok", 0.8), (" \x1b[2J\x07\x9b31m\r", 0.9))
    shown = drawn(answer_text(attack))
    assert not set(shown) & set("\x1b\x07\x9b\r")
    assert "␛[2J" in shown


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


def test_table_says_when_greedy_takes_the_same() -> None:
    same = generation((" water", 0.9), candidates=[Candidate(**figures(" water"), is_greedy=True)])
    assert drawn(risk_point_table(same)).splitlines()[3].split()[-1] == "both"


@pytest.mark.parametrize("width", [44, 60, 200])
def test_table_fits_narrow_terminals_with_every_figure_whole(width: int) -> None:
    shown = drawn(risk_point_table(RISKY), width)
    assert max(map(len, shown.splitlines())) <= width
    for figure in ("-2.25", "0.020", "0.900", "-7.50", "kept", "greedy", "-9.00"):
        assert figure in shown


FIRST = generation(("Sound travels", 0.8), (" faster in water.", 0.9))
OTHER = generation(("Sound travels faster in", 0.8), (" wood.", 0.9), method="greedy")


def test_a_comparison_stands_side_by_side_with_its_differences_marked() -> None:
    heading, text = drawn(Comparison([FIRST, OTHER], marks=True), 160).splitlines()
    assert heading.split() == ["cocoa-sig", "greedy"]
    assert (
        " ".join(text.split()) == "Sound travels [faster in|3] {[water|3]}[.|3] Sound travels faster in {[wood|3]}[.|3]"
    )


def test_a_comparison_in_colour_dims_what_the_answers_share() -> None:
    first, other = Comparison([FIRST, OTHER]).answers
    assert first.plain == FIRST.text
    assert other.plain == OTHER.text
    assert {other.plain[span.start : span.end] for span in other.spans if "dim" in str(span.style)} == {
        "Sound travels faster in",
        ".",
    }
    (differing,) = (span for span in first.spans if first.plain[span.start : span.end] == "water")
    assert str(differing.style) == "bold #ffffff on #c00000"


def test_a_comparison_too_wide_for_the_terminal_stands_one_below_the_other() -> None:
    lines = drawn(Comparison([FIRST, OTHER], marks=True), 50).splitlines()
    assert lines == [
        "cocoa-sig",
        "Sound travels [faster in|3] {[water|3]}[.|3]",
        "",
        "greedy",
        "Sound travels faster in {[wood|3]}[.|3]",
    ]


def test_equal_answers_are_said_to_be_so() -> None:
    assert "The answers are the same." in drawn(report([FIRST, FIRST.model_copy()]))
    assert "The answers are the same." not in drawn(report([FIRST, OTHER]))


def test_report_of_an_empty_answer() -> None:
    shown = drawn(report([generation()], table=True), 200)
    assert "no spans." in shown
    assert "cocoa-sig: 0 tokens, 0 spans, 0 risk points, 5 forward passes, ended by the model." in shown


def test_a_real_answer_is_drawn_whole(engine: CocoaEngine) -> None:
    answer = engine.generate("The three primary colours are", max_new_tokens=12)
    assert answer_text(answer).plain == answer.text
    risk_points = [span for span in answer.spans if span.kind == "risk_point"]
    assert risk_points
    table = risk_point_table(answer)
    assert table.row_count == sum(1 + len(span.candidates) for span in risk_points)
    taken = list(table.columns[-1].cells)
    assert sum(cell in ("kept", "both") for cell in taken) == len(risk_points)
    assert sum(cell in ("greedy", "both") for cell in taken) == len(risk_points)
