"""Answers, legends and risk points as rich renderables, for terminals and notebooks.

Text of a model is never read as rich markup, and control characters in it are shown instead of obeyed. Risk has four
levels, drawn as underlined, black on yellow and white on red; with ``marks=True`` they are written into the text
instead, ``[like this|2]``, for output without colour. What reached ``max_risk`` is white on purple, or ``[like
this|2!]``; white space that did so is named by ``marks`` alone. Where answers are compared, what they share is dimmed,
or what differs is put ``{in braces}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cocoa_engine.rendering.differences import Range, cut, differences
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.words import (
    REACHED,
    any_reached,
    before,
    edges,
    mark,
    names,
    safe,
    scale_words,
    summary_words,
    taken,
    visible,
)
from cocoa_engine.results import Generation
from cocoa_engine.spans import Span

# Lightness and underline carry the order, so that it survives colour blindness; yellow and red bring their own
# foreground, so that they read alike on dark and on light terminals.
STYLES = ("", "underline", "#000000 on #ffd75f", "bold #ffffff on #c00000")

REACHED_STYLE = "bold #ffffff on #5f00af"

NARROWEST_COLUMN = 28


def answer_text(generation: Generation, *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """The answer, each span drawn at its level of risk.

    Args:
        scale: the scale to draw on; by default the answer's own.
        marks: write the levels into the text instead of colouring it.
    """
    return spans_text(generation.spans, scale=scale, marks=marks)


def spans_text(spans: Iterable[Span], *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """Like :func:`answer_text`, for an answer that is still being decoded."""
    spans = list(spans)
    scale = scale or RiskScale.of(spans)
    text = Text()
    for span in spans:
        _append(text, span.text, scale.level(span.risk), marks, reached=span.reaches_max_risk)
    return text


def legend(*generations: Generation, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """What the levels of risk mean in these answers, in figures, and on which scale they are."""
    scale = scale or RiskScale.of(span for one in generations for span in one.spans)
    text = Text().append(scale_words(generations, scale), style="dim")
    for level, figures in enumerate(scale.ranges):
        text.append(" " if level else "\n")
        _append(text, figures, level, marks)
    if any_reached(generations):
        text.append(" " if scale.ranges else "\n")
        text.append(f"! {REACHED}" if marks else REACHED, style="" if marks else REACHED_STYLE)
    return text


def summary(generation: Generation) -> Text:
    """The size and the cost of an answer, and why it ended, in one line."""
    return Text(summary_words(generation), style="dim")


def risk_point_table(generation: Generation) -> Table:
    """Every candidate of every risk point, with its figures.

    The last column names the one that was ``kept``, the one that ``greedy`` decoding would have taken, or ``both``.
    Spaces at the ends of a candidate show as ``␣``, line ends as ``\\n``; a candidate that ends the answer without
    text as ``(end)``.
    """
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("candidates", overflow="fold", min_width=6)
    for name in ("log p", "ConMLDS", "fMLDS", "score"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("taken", no_wrap=True)
    risk_points = [span for span in generation.spans if span.candidates]
    for number, span in enumerate(risk_points, start=1):
        table.add_section()
        words = before(generation.text, span.start)
        table.add_row(str(number), Text(f"after “{words}”" if words else "at the start"), style="dim")
        for index, candidate in enumerate(span.candidates):
            kept = index == span.chosen
            table.add_row(
                "",
                Text(visible(candidate.text)),
                f"{candidate.log_prob:.2f}",
                f"{candidate.con_mlds:.3f}",
                f"{candidate.f_mlds:.3f}",
                f"{candidate.score:.2f}",
                taken(candidate, kept),
                style="bold" if kept else "",
            )
    return table


class Comparison:
    """Several answers to one prompt side by side, or below one another where that would be too narrow.

    Args:
        scale: the scale to draw on; by default that of all of them.
        marks: write levels and differences into the text instead of colouring it.
    """

    def __init__(
        self, generations: Sequence[Generation], *, scale: RiskScale | None = None, marks: bool = False
    ) -> None:
        scale = scale or RiskScale.of(span for one in generations for span in one.spans)
        differing = differences([one.text for one in generations])
        self.names = [Text(name, style="bold") for name in names(generations)]
        self.answers = [
            _compared(one.spans, ranges, scale, marks) for one, ranges in zip(generations, differing, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich asks for it."""
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


def report(generations: Sequence[Generation], *, table: bool = False, marks: bool = False) -> RenderableType:
    """An answer, or several to one prompt, with a legend and if asked the tables of their risk points."""
    scale = RiskScale.of(span for one in generations for span in one.spans)
    parts: list[RenderableType]
    if len(generations) == 1:
        parts = [answer_text(generations[0], scale=scale, marks=marks), Text()]
    else:
        parts = [Comparison(generations, scale=scale, marks=marks), Text()]
        if len({one.text for one in generations}) == 1:
            parts += [Text("The answers are the same.", style="bold"), Text()]
    for one, name in zip(generations, names(generations), strict=True):
        if table and any(span.candidates for span in one.spans):
            heading = [Text(name, style="bold")] if len(generations) > 1 else []
            parts += [*heading, risk_point_table(one), Text()]
    parts.append(legend(*generations, scale=scale, marks=marks))
    if len(generations) > 1:
        parts.append(
            Text("{Words that another answer lacks}" if marks else "Words that all share are dim.", style="dim")
        )
    parts += [summary(one) for one in generations]
    return Group(*parts)


def _append(text: Text, piece: str, level: int, marks: bool, style: str = "", reached: bool = False) -> None:
    """Appends one piece at a level; white space at its ends stays unmarked, so that words stand apart."""
    before, core, after = edges(safe(piece))
    if marks and reached and not core:
        core = visible(piece)
    if marks and core and (risk := mark(level, reached)):
        core = f"[{core}|{risk}]"
    risk_style = REACHED_STYLE if reached else STYLES[level]
    text.append(before).append(core, style="" if marks else f"{style} {risk_style}".strip()).append(after)


def _compared(spans: Iterable[Span], differing: Sequence[Range], scale: RiskScale, marks: bool) -> Text:
    """The spans of an answer, with the ranges of it that differ."""
    text = Text()
    for span in spans:
        for part, differs in cut(span.text, span.start, differing):
            if marks and differs:
                before, core, after = edges(part)
                text.append(before + "{")
                _append(text, core, scale.level(span.risk), marks, reached=span.reaches_max_risk)
                text.append("}" + after)
            else:
                style = "" if differs else "dim"
                _append(text, part, scale.level(span.risk), marks, style, span.reaches_max_risk)
    return text
