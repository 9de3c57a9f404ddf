"""Answers, legends and risk points as rich renderables, for terminals and notebooks.

The verdict comes first; the riskiest claims are shaded and listed; everything else is a detail. Text from the model is
never read as rich markup, and its control characters are made visible. Risk has four levels: plain, underlined, black
on yellow, and white on red. With ``marks=True``, for output without colour, levels are written into the text instead:
``[like this|2]``. A span that reached ``max_risk`` is white on purple, or ``[like this|0!]``; if it is white space,
only ``marks=True`` shows it. In a comparison, text that the answers share is dimmed; with ``marks=True``, text that
differs is put ``{in braces}``, which nest with the brackets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cocoa_engine.rendering.highlights import MOST_SHADED, Piece, RiskScale, differences, pieces, stopped_without_text
from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.wording import (
    CANDIDATE_COLUMNS,
    CHECK_THESE,
    NOTHING,
    REACHED,
    answer_names,
    any_reached,
    bar,
    candidate_values,
    describe_answer,
    describe_check,
    describe_choice,
    describe_different_kinds,
    describe_scale,
    mark,
    split_whitespace,
    verdict,
    visible,
    words_before,
)
from cocoa_engine.risk import Check
from cocoa_engine.safe_text import safe
from cocoa_engine.spans import RAW, RiskSource, Span

# Lightness and underline show the order of the levels, so that colour-blind readers see it too. Yellow and red set
# their own foreground, so that they look the same on dark and light terminals.
STYLES = ("", "underline", "#000000 on #ffd75f", "bold #ffffff on #c00000")

REACHED_STYLE = "bold #ffffff on #5f00af"

NARROWEST_COLUMN = 28
NARROWEST_TABLE = 60


def answer_text(answer: Answer, *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """The answer, with its riskiest claims in the style of their level.

    Args:
        answer: what to show.
        scale: the scale of risk. Default: that of the answer.
        marks: write the levels into the text instead of colouring it.
    """
    scale = scale or RiskScale.of(answer.spans)
    return _drawn(answer, pieces(answer, answer.check_these(MOST_SHADED), scale), marks)


def spans_text(spans: Iterable[Span], *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """An answer that may still be decoded: its text, with the span that reached ``max_risk``.

    Args:
        spans: the spans so far.
        scale: the scale of risk. Each span is in the style of its level; without a scale, spans are not shaded.
        marks: write the levels into the text instead of colouring it.
    """
    text = Text()
    for span in spans:
        level = 0 if scale is None else scale.level(span.risk)
        _append(text, span.text, level, marks, reached=span.reaches_max_risk)
    return text


def check_list(found: Sequence[Check], source: RiskSource | None = None) -> Text:
    """The claims to check, one a line.

    Args:
        found: the claims.
        source: the source of their risk. By a raw MLDS no claim is listed, which says nothing about the claims.
    """
    if not found:
        return Text("" if source in RAW else NOTHING, style="dim")
    lines = [f"{number}. {describe_check(one)}" for number, one in enumerate(found, start=1)]
    return Text("\n").join([Text(CHECK_THESE, style="bold"), *map(Text, lines)])


def sentence_list(answer: Answer) -> Text:
    """The sentences, each with a bar and its risk."""
    lines = []
    for sentence in answer.sentences:
        risk = " –  " if sentence.risk is None else f"{sentence.risk:.2f}"
        lines.append(Text(f"{bar(sentence)} {risk} {safe(' '.join(sentence.text.split()))}"))
    return Text("\n").join(lines)


def legend(*answers: Answer, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """The kind of scale of these answers, and the range of each level of risk."""
    scale = scale or RiskScale.of(span for answer in answers for span in answer.spans)
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
    ``both``, and others that end the answer (``ends``). Spaces at the ends of a candidate are shown as ``␣``, line
    ends as ``\\n``, and a candidate that ends the answer without text as ``(end)``.
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


class RiskPoints:
    """:func:`risk_point_table`, or a list where the screen is too narrow for it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich."""
        if options.max_width >= NARROWEST_TABLE:
            yield risk_point_table(self.answer)
            return
        for number, span in enumerate((one for one in self.answer.spans if one.candidates), start=1):
            words = words_before(self.answer.text, span.start, 16)
            yield Text(f"{number} after “{words}”" if words else f"{number} at the start", style="dim")
            for index, candidate in enumerate(span.candidates):
                kept = index == span.chosen
                taken = describe_choice(candidate, kept)
                yield Text(f"  {visible(candidate.text)}{f' ({taken})' if taken else ''}", style="bold" if kept else "")
                named = zip(CANDIDATE_COLUMNS, candidate_values(candidate), strict=True)
                yield Text("    " + ", ".join(f"{name} {value}" for name, value in named), style="dim")


def marked(parts: Iterable[Piece]) -> str:
    """The pieces of an answer with risk in brackets and differences in braces.

    Both nest: braces are around the brackets if all text in the brackets differs, otherwise inside.
    """
    text = []
    for (_, reached), group in groupby(parts, key=lambda one: (one.number, one.number is None and one.reached)):
        found = list(group)
        shown = [one for one in found if safe(one.text).strip()]
        risk = mark(found[0].level, reached or any(one.reached for one in shown))
        all_differ = bool(risk) and all(one.differs for one in shown)
        written = "".join(safe(one.text) if all_differ else _in_braces(one) for one in found)
        before, core, after = split_whitespace(written)
        if core and risk:
            core = f"{{[{core}|{risk}]}}" if all_differ else f"[{core}|{risk}]"
        text += [before, core, after]
    return "".join(text)


class Comparison:
    """Several answers to one prompt, each with its verdict above it and its claims to check beneath.

    They stand side by side, or one below the other on a narrow screen.

    Args:
        answers: at least two.
        scale: the scale of risk. Default: that of all the answers.
        marks: write levels and differences into the text instead of colouring it.
    """

    def __init__(self, answers: Sequence[Answer], *, scale: RiskScale | None = None, marks: bool = False) -> None:
        scale = scale or RiskScale.of(span for answer in answers for span in answer.spans)
        differing = differences([answer.text for answer in answers])
        self.names = [Text(name, style="bold") for name in answer_names(answers)]
        self.verdicts = [Text(verdict(answer), style="bold") for answer in answers]
        self.checks = [check_list(answer.check_these(MOST_SHADED), answer.risk_source) for answer in answers]
        self.answers = [
            _drawn(one, pieces(one, one.check_these(MOST_SHADED), scale, ranges), marks, compared=True)
            for one, ranges in zip(answers, differing, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich."""
        space = [Text()] * len(self.answers)
        rows = [self.names, self.verdicts, space, self.answers, space, self.checks]
        if options.max_width < NARROWEST_COLUMN * len(self.answers):
            for number, parts in enumerate(zip(*rows, strict=True)):
                yield Group(*([Text()] if number else []), *parts)
            return
        grid = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in self.answers:
            grid.add_column(ratio=1, overflow="fold")
        for row in rows:
            grid.add_row(*row)
        yield grid


def report(answers: Sequence[Answer], *, table: bool = False, marks: bool = False) -> RenderableType:
    """One answer, or several to the same prompt: a verdict, the text with its riskiest claims, the claims to check.

    Args:
        answers: at least one.
        table: add the details: the risk of every span and sentence, every candidate of every risk point, the cost.
        marks: write levels and differences into the text instead of colouring it.
    """
    several = len(answers) > 1
    parts: list[RenderableType]
    if several:
        scale = RiskScale.of(span for answer in answers for span in answer.spans)
        parts = [Comparison(answers, scale=scale, marks=marks), Text()]
        if len({answer.text for answer in answers}) == 1:
            parts += [Text("The answers are the same.", style="bold"), Text()]
        differing = "{Words that another answer lacks}" if marks else "Words that all share are dim."
        parts.append(Text(differing, style="dim"))
        if (kinds := describe_different_kinds(answers)) is not None:
            parts.append(Text(kinds))
    else:
        parts = [Text(verdict(answers[0]), style="bold"), Text(), answer_text(answers[0], marks=marks), Text()]
        parts += [check_list(answers[0].check_these(MOST_SHADED), answers[0].risk_source)]
    if not table:
        return Group(*parts, *([reached_legend(marks)] if any_reached(answers) else []))
    for one, name in zip(answers, answer_names(answers), strict=True):
        parts += [Text(), *([Text(name, style="bold")] if several else [])]
        parts += [spans_text(one.spans, scale=RiskScale.of(one.spans), marks=marks), Text(), sentence_list(one)]
        if any(span.candidates for span in one.spans):
            parts += [Text(), RiskPoints(one)]
    parts += [Text(), legend(*answers, marks=marks), *(summary(answer) for answer in answers)]
    return Group(*parts)


def reached_legend(marks: bool) -> Text:
    """What the mark of a span that reached ``max_risk`` means."""
    return Text(f"! {REACHED}" if marks else REACHED, style="" if marks else REACHED_STYLE)


def _append(text: Text, piece: str, level: int, marks: bool, style: str = "", reached: bool = False) -> None:
    """Append one piece in the style of its level. White space at its ends stays unmarked, to keep words apart."""
    before, core, after = split_whitespace(safe(piece))
    if marks and reached and not core:
        core = visible(piece)
    if marks and core and (risk := mark(level, reached)):
        core = f"[{core}|{risk}]"
    risk_style = REACHED_STYLE if reached else STYLES[level]
    text.append(before).append(core, style="" if marks else f"{style} {risk_style}".strip()).append(after)


def _drawn(answer: Answer, parts: Sequence[Piece], marks: bool, *, compared: bool = False) -> Text:
    """The pieces of an answer; compared with another, those that the answers share are dim."""
    if marks:
        stopped = stopped_without_text(answer)
        return Text(marked(parts) + ("" if stopped is None else f"[{visible(stopped)}|0!]"))
    text = Text()
    for part in parts:
        before, core, after = split_whitespace(safe(part.text))
        style = REACHED_STYLE if part.reached else STYLES[part.level]
        dim = "dim" if compared and not part.differs else ""
        text.append(before, style=dim).append(core, style=f"{dim} {style}".strip()).append(after, style=dim)
    return text


def _in_braces(one: Piece) -> str:
    """The text of a piece, in braces if it differs."""
    before, core, after = split_whitespace(safe(one.text))
    return f"{before}{{{core}}}{after}" if one.differs and core else before + core + after
