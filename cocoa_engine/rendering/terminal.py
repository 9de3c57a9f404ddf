"""Answers, legends and risk points as rich renderables, for terminals and notebooks.

The verdict comes first; the riskiest claims are shaded and listed; everything else is a detail. Text from the model is
never read as rich markup, and its control characters are made visible. Risk has four levels: plain, underlined, black
on yellow, and white on red. With ``marks=True``, for output without colour, levels are written into the text instead:
``[like this|2]``. A span that reached ``max_risk`` is white on purple, or ``[like this|0!]``; if it is white space,
only ``marks=True`` shows it. In a comparison, text that the answers share is dimmed; with ``marks=True``, text that
differs is put ``{in braces}``, which nest with the brackets.
"""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import Markdown
from rich.table import Column, Table
from rich.text import Text

from cocoa_engine.errors import safe
from cocoa_engine.rendering import wording
from cocoa_engine.rendering.highlights import (
    MOST_SHADED,
    Answer,
    Piece,
    Range,
    RiskScale,
    differences,
    marked,
    pieces,
    split_whitespace,
)
from cocoa_engine.risk import Check
from cocoa_engine.spans import RAW, RiskSource, Span


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = None) -> list[str]:
    """A table as lines of Markdown. The first ``left`` columns are texts, the others numbers; `None`: all are texts."""
    rules = ["---" if left is None or number < left else "---:" for number in range(len(headings))]
    return [f"| {' | '.join(map(inline, cells))} |" for cells in (headings, rules, *rows)]


def inline(text: str) -> str:
    """A text in one line, which neither ends a cell nor begins HTML."""
    return " ".join(safe(text).split()).replace("|", "\\|").replace("<", "\\<")


def show(text: str, console: Console, *, as_markdown: bool = False) -> None:
    """Print Markdown: drawn on a terminal that has colours and is wide enough for its tables, otherwise as it is."""
    widest = max((len(line) for line in text.splitlines() if line.startswith("|")), default=0)
    if as_markdown or not console.is_terminal or console.color_system is None or widest > console.width:
        console.print(text, end="", soft_wrap=True, markup=False, highlight=False)
    else:
        console.print(Markdown(text, hyperlinks=False))


# Lightness and underline show the order of the levels, so that colour-blind readers see it too. Yellow and red set
# their own foreground, so that they look the same on dark and light terminals.
STYLES = ("", "underline", "#000000 on #ffd75f", "bold #ffffff on #c00000")

REACHED_STYLE = "bold #ffffff on #5f00af"

NARROWEST_COLUMN = 28
BAR = 10  # characters


def answer_text(
    answer: Answer, *, marks: bool = False, scale: RiskScale | None = None, differing: Sequence[Range] | None = None
) -> Text:
    """The answer, with its riskiest claims in the style of their level.

    ``differing`` are the ranges in which it differs from others beside it.
    """
    scale = scale or RiskScale.of(answer.spans)
    parts = pieces(answer, answer.check_these(MOST_SHADED), scale, differing or ())
    return _drawn(parts, marks, compared=differing is not None)


def spans_text(spans: Iterable[Span], *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """An answer that may still be decoded: its text, with the span that reached ``max_risk``.

    Each span is in the style of its level on the scale; without a scale, spans are not shaded. ``marks`` writes the
    levels into the text instead.
    """
    levels = scale or RiskScale(absolute=False)
    parts = [
        Piece(span.text, levels.level(span.risk), number, reached=span.reaches_max_risk)
        for number, span in enumerate(spans)
    ]
    return _drawn(parts, marks)


def check_list(checks: Sequence[Check], source: RiskSource | None = None) -> Text:
    """The claims to check, one a line."""
    if not checks:
        return Text("" if source in RAW else wording.NOTHING, style="dim")
    lines = [f"{number}. {wording.describe_check(check)}" for number, check in enumerate(checks, start=1)]
    return Text("\n").join([Text(wording.CHECK_THESE, style="bold"), *map(Text, lines)])


def legend(*answers: Answer, marks: bool = False) -> Text:
    """The kind of scale of these answers, and the range of each level of risk."""
    scale = RiskScale.of(span for answer in answers for span in answer.spans)
    text = Text(wording.describe_scale(answers, scale), style="dim")
    levels = [_drawn([Piece(bounds, level, level)], marks) for level, bounds in enumerate(scale.ranges)]
    levels += _reached(answers, marks)
    return Text("\n").join([text, Text(" ").join(levels)] if levels else [text])


def _reached(answers: Iterable[Answer], marks: bool) -> list[Text]:
    """What the mark of a span that reached ``max_risk`` means, if there is one."""
    sign = Text(f"! {wording.REACHED}") if marks else Text(wording.REACHED, style=REACHED_STYLE)
    return [sign] if wording.any_reached(answers) else []


def risk_point_table(answer: Answer) -> Table:
    """Every candidate of every risk point, with its scores.

    The last column marks the candidate that was ``kept``, the one that ``greedy`` decoding would have taken, or
    ``both``, and others that end the answer (``ends``). Spaces at the ends of a candidate are shown as ``␣``, line
    ends as ``\\n``, and a candidate that ends the answer without text as ``(end)``.
    """
    *names, taken = wording.CANDIDATE_COLUMNS
    first, *numbers = (Column(name, justify="right", no_wrap=True) for name in ("#", *names))
    columns = [first, Column("candidates", overflow="fold", min_width=6), *numbers, Column(taken, no_wrap=True)]
    table = Table(*columns, box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for number, span in enumerate((span for span in answer.spans if span.candidates), start=1):
        table.add_section()
        words = wording.words_before(answer.text, span.start)
        table.add_row(str(number), Text(f"after “{words}”" if words else "at the start"), style="dim")
        for is_chosen, text, values in wording.candidate_rows(span):
            table.add_row("", Text(text), *values, style="bold" if is_chosen else "")
    return table


class Comparison:
    """Several answers to one prompt, each with its verdict above it and its claims to check beneath.

    They stand side by side, or one below the other on a narrow screen.
    """

    def __init__(self, answers: Sequence[Answer], *, marks: bool = False) -> None:
        scale = RiskScale.of(span for answer in answers for span in answer.spans)
        differing = differences([answer.text for answer in answers])
        self.answers = [
            answer_text(answer, marks=marks, scale=scale, differing=ranges)
            for answer, ranges in zip(answers, differing, strict=True)
        ]
        self.parts = [
            (
                Text(name, style="bold"),
                Text(wording.verdict(answer), style="bold"),
                Text(),
                text,
                Text(),
                check_list(answer.check_these(MOST_SHADED), answer.risk_source),
            )
            for answer, name, text in zip(answers, wording.answer_names(answers), self.answers, strict=True)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < NARROWEST_COLUMN * len(self.answers):
            for number, parts in enumerate(self.parts):
                yield Group(*([Text()] if number else []), *parts)
            return
        grid = Table.grid(padding=(0, 3, 0, 0), expand=True)
        for _ in self.answers:
            grid.add_column(ratio=1, overflow="fold")
        for row in zip(*self.parts, strict=True):
            grid.add_row(*row)
        yield grid


def report(answers: Sequence[Answer], *, table: bool = False, marks: bool = False) -> RenderableType:
    """One answer, or several to the same prompt: a verdict, the text with its riskiest claims, the claims to check.

    ``table`` adds the details: the risk of every span and sentence, every candidate of every risk point, the cost.
    ``marks`` writes levels and differences into the text instead of colouring it.
    """
    first, *others = answers
    parts: list[RenderableType]
    if others:
        parts = [Comparison(answers, marks=marks), Text()]
        if all(answer.text == first.text for answer in others):
            parts += [Text("The answers are the same.", style="bold"), Text()]
        differing = "{Words that another answer lacks}" if marks else "Words that all share are dim."
        parts.append(Text(differing, style="dim"))
        if (kinds := wording.describe_different_kinds(answers)) is not None:
            parts.append(Text(kinds))
    else:
        parts = [Text(wording.verdict(first), style="bold"), Text(), answer_text(first, marks=marks), Text()]
        parts += [check_list(first.check_these(MOST_SHADED), first.risk_source)]
    if not table:
        return Group(*parts, *_reached(answers, marks))
    for answer, name in zip(answers, wording.answer_names(answers), strict=True):
        parts += [Text(), *([Text(name, style="bold")] if others else [])]
        parts += [spans_text(answer.spans, scale=RiskScale.of(answer.spans), marks=marks), Text()]
        for sentence in answer.sentences:
            filled = 0 if sentence.risk is None else round(BAR * min(max(sentence.risk, 0.0), 1.0))
            bar = "█" * filled + "░" * (BAR - filled)
            parts.append(Text(f"{bar} {wording.risk_text(sentence):^4} {wording.one_line(sentence.text)}"))
        if any(span.candidates for span in answer.spans):
            parts += [Text(), risk_point_table(answer)]
    costs = [Text(wording.describe_answer(answer), style="dim") for answer in answers]
    return Group(*parts, Text(), legend(*answers, marks=marks), *costs)


def _drawn(parts: Sequence[Piece], marks: bool, *, compared: bool = False) -> Text:
    """The pieces of an answer; compared with another, those that the answers share are dim."""
    if marks:
        return Text(marked(parts))
    text = Text()
    for part in parts:
        before, core, after = split_whitespace(safe(part.text))
        style = REACHED_STYLE if part.reached else STYLES[part.level]
        dim = "dim" if compared and not part.differs else ""
        text.append(before, style=dim).append(core, style=f"{dim} {style}".strip()).append(after, style=dim)
    return text
