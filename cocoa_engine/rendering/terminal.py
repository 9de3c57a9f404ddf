"""Answers, legends and risk points as rich renderables, for terminals and notebooks.

Text from the model is never read as rich markup, and its control characters are made visible. Risk has four levels:
plain, underlined, black on yellow, and white on red. With ``marks=True``, for output without colour, levels are written
into the text instead: ``[like this|2]``. A span that reached ``max_risk`` is white on purple, or ``[like this|2!]``; if
it is white space, only ``marks=True`` shows it. In a comparison, text that the answers share is dimmed; with
``marks=True``, text that differs is put ``{in braces}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cocoa_engine.rendering.differences import Range, cut, differences
from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.wording import (
    CANDIDATE_COLUMNS,
    REACHED,
    answer_names,
    any_reached,
    candidate_values,
    describe_answer,
    describe_choice,
    describe_scale,
    mark,
    split_whitespace,
    visible,
    words_before,
)
from cocoa_engine.safe_text import safe
from cocoa_engine.spans import Span

# Lightness and underline show the order of the levels, so that colour-blind readers see it too. Yellow and red set
# their own foreground, so that they look the same on dark and light terminals.
STYLES = ("", "underline", "#000000 on #ffd75f", "bold #ffffff on #c00000")

REACHED_STYLE = "bold #ffffff on #5f00af"

NARROWEST_COLUMN = 28


def answer_text(answer: Answer, *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """The answer, each span in the style of its level of risk.

    Args:
        answer: what to show.
        scale: the scale of risk. Default: that of the answer.
        marks: write the levels into the text instead of colouring it.
    """
    return spans_text(answer.spans, scale=scale, marks=marks)


def spans_text(spans: Iterable[Span], *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """The same as :func:`answer_text`, for an answer that is still being decoded."""
    spans = list(spans)
    scale = scale or RiskScale.of(spans)
    text = Text()
    for span in spans:
        _append(text, span.text, scale.level(span.risk), marks, reached=span.reaches_max_risk)
    return text


def legend(*answers: Answer, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """The kind of scale of these answers, and the range of each level of risk."""
    scale = scale or RiskScale.of(span for one in answers for span in one.spans)
    text = Text().append(describe_scale(answers, scale), style="dim")
    for level, bounds in enumerate(scale.ranges):
        text.append(" " if level else "\n")
        _append(text, bounds, level, marks)
    if any_reached(answers):
        text.append(" " if scale.ranges else "\n")
        text.append(f"! {REACHED}" if marks else REACHED, style="" if marks else REACHED_STYLE)
    return text


def summary(answer: Answer) -> Text:
    """One line: the size and cost of an answer, and why it ended."""
    return Text(describe_answer(answer), style="dim")


def risk_point_table(answer: Answer) -> Table:
    """Every candidate of every risk point, with its scores.

    The last column marks the candidate that was ``kept``, the one that ``greedy`` decoding would have taken, or
    ``both``. Spaces at the ends of a candidate are shown as ``␣``, line ends as ``\\n``, and a candidate that ends the
    answer without text as ``(end)``.
    """
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("candidates", overflow="fold", min_width=6)
    for name in CANDIDATE_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("taken", no_wrap=True)
    risk_points = [span for span in answer.spans if span.candidates]
    for number, span in enumerate(risk_points, start=1):
        table.add_section()
        words = words_before(answer.text, span.start)
        table.add_row(str(number), Text(f"after “{words}”" if words else "at the start"), style="dim")
        for index, candidate in enumerate(span.candidates):
            kept = index == span.chosen
            table.add_row(
                "",
                Text(visible(candidate.text)),
                *candidate_values(candidate),
                describe_choice(candidate, kept),
                style="bold" if kept else "",
            )
    return table


class Comparison:
    """Several answers to one prompt: side by side, or one below the other on a narrow screen.

    Args:
        answers: at least two.
        scale: the scale of risk. Default: that of all the answers.
        marks: write levels and differences into the text instead of colouring it.
    """

    def __init__(self, answers: Sequence[Answer], *, scale: RiskScale | None = None, marks: bool = False) -> None:
        scale = scale or RiskScale.of(span for one in answers for span in one.spans)
        differing = differences([one.text for one in answers])
        self.names = [Text(name, style="bold") for name in answer_names(answers)]
        self.answers = [
            _compared(one.spans, ranges, scale, marks) for one, ranges in zip(answers, differing, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich."""
        if options.max_width < NARROWEST_COLUMN * len(self.answers):
            for number, (name, answer) in enumerate(zip(self.names, self.answers, strict=True)):
                yield Group(*([Text()] if number else []), name, answer)
            return
        grid = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in self.answers:
            grid.add_column(ratio=1, overflow="fold")
        grid.add_row(*self.names)
        grid.add_row(*self.answers)
        yield grid


def report(answers: Sequence[Answer], *, table: bool = False, marks: bool = False) -> RenderableType:
    """One answer, or several to the same prompt, with a legend and a summary.

    Args:
        answers: at least one.
        table: add every candidate of every risk point.
        marks: write levels and differences into the text instead of colouring it.
    """
    scale = RiskScale.of(span for one in answers for span in one.spans)
    parts: list[RenderableType]
    if len(answers) == 1:
        parts = [answer_text(answers[0], scale=scale, marks=marks), Text()]
    else:
        parts = [Comparison(answers, scale=scale, marks=marks), Text()]
        if len({one.text for one in answers}) == 1:
            parts += [Text("The answers are the same.", style="bold"), Text()]
    for one, name in zip(answers, answer_names(answers), strict=True):
        if table and any(span.candidates for span in one.spans):
            heading = [Text(name, style="bold")] if len(answers) > 1 else []
            parts += [*heading, risk_point_table(one), Text()]
    parts.append(legend(*answers, scale=scale, marks=marks))
    if len(answers) > 1:
        parts.append(
            Text("{Words that another answer lacks}" if marks else "Words that all share are dim.", style="dim")
        )
    parts += [summary(one) for one in answers]
    return Group(*parts)


def _append(text: Text, piece: str, level: int, marks: bool, style: str = "", reached: bool = False) -> None:
    """Append one piece in the style of its level. White space at its ends stays unmarked, to keep words apart."""
    before, core, after = split_whitespace(safe(piece))
    if marks and reached and not core:
        core = visible(piece)
    if marks and core and (risk := mark(level, reached)):
        core = f"[{core}|{risk}]"
    risk_style = REACHED_STYLE if reached else STYLES[level]
    text.append(before).append(core, style="" if marks else f"{style} {risk_style}".strip()).append(after)


def _compared(spans: Iterable[Span], differing: Sequence[Range], scale: RiskScale, marks: bool) -> Text:
    """The spans of an answer, with the ranges that differ from another answer made visible."""
    text = Text()
    for span in spans:
        for part, differs in cut(span.text, span.start, differing):
            if marks and differs:
                before, core, after = split_whitespace(part)
                text.append(before + "{")
                _append(text, core, scale.level(span.risk), marks, reached=span.reaches_max_risk)
                text.append("}" + after)
            else:
                style = "" if differs else "dim"
                _append(text, part, scale.level(span.risk), marks, style, span.reaches_max_risk)
    return text
