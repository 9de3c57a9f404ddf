"""Answers, legends and risk points as rich renderables, for terminals and notebooks.

Text of a model is never read as rich markup, and control characters in it are shown instead of obeyed. Risk has four
levels, drawn as underlined, black on yellow and white on red; with ``marks=True`` they are written into the text
instead, ``[like this|2]``, for output without colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cocoa_engine.results import Generation, Span

METRIC_NAMES = {"f_mlds": "fMLDS", "con_mlds": "ConMLDS"}
FINISH_REASONS = {
    "stop": "stopped as asked",
    "eos": "ended by the model",
    "length": "cut off by max_new_tokens",
    "risk": "stopped by max_risk",
}

# Lightness and underline carry the order, so that it survives colour blindness; yellow and red bring their own
# foreground, so that they read alike on dark and on light terminals.
STYLES = ("", "underline", "#000000 on #ffd75f", "bold #ffffff on #c00000")

# C0 controls but tab and newline become their Unicode pictures, DEL likewise, and C1 controls a replacement character.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclass(frozen=True)
class RiskScale:
    """Which level of risk, 0 to 3, a span's figure is shown at.

    Attributes:
        low, high: the range that is divided into four equal steps.
        calibrated: whether the range is the absolute [0, 1] of a calibrated risk, or that of the texts themselves.
    """

    low: float
    high: float
    calibrated: bool

    @classmethod
    def of(cls, spans: Iterable[Span]) -> RiskScale:
        """Absolute if every span's risk is calibrated, else relative to those of these spans that can be seen.

        Raw MLDS has no absolute scale: some models put every span near 0.9.
        """
        spans = [span for span in spans if span.text.strip()]
        if spans and all(span.calibrated for span in spans):
            return cls(0.0, 1.0, True)
        risks = [span.risk for span in spans] or [0.0]
        return cls(min(risks), max(risks), False)

    @property
    def bounds(self) -> list[float]:
        """The five ends of the four levels."""
        step = (self.high - self.low) / len(STYLES)
        return [self.low + step * level for level in range(len(STYLES) + 1)]

    def level(self, risk: float) -> int:
        """The level of a risk; 0 for every risk if the range is empty."""
        return sum(risk >= bound for bound in self.bounds[1:-1]) if self.high > self.low else 0


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
        _append(text, span.text, scale.level(span.risk), marks)
    return text


def legend(generation: Generation, *, scale: RiskScale | None = None, marks: bool = False) -> Text:
    """What the levels of risk mean in this answer, in figures, and on which scale they are."""
    scale = scale or RiskScale.of(generation.spans)
    if scale.calibrated:
        words = "Risk, calibrated (0 to 1):"
    else:
        metric = METRIC_NAMES[generation.config.metric]
        texts = "this text's own range" if scale == RiskScale.of(generation.spans) else "the range of these texts"
        words = f"Risk by raw {metric}, not a probability, relative to {texts}:"
    text = Text().append(words, style="dim")
    if scale.low == scale.high:
        return text.append(f" {scale.low:.3f} throughout." if generation.spans else " no spans.", style="dim")
    bounds = scale.bounds
    for level in range(len(STYLES)):
        text.append(" " if level else "\n")
        _append(text, f"{bounds[level]:.3f}–{bounds[level + 1]:.3f}", level, marks)
    return text


def summary(generation: Generation) -> Text:
    """The size and the cost of an answer, and why it ended, in one line."""
    usage = generation.usage
    counts = (
        _count(usage.completion_tokens, "token"),
        _count(len(generation.spans), "span"),
        _count(usage.risk_points, "risk point"),
        _count(usage.forward_passes, "forward pass", "forward passes"),
    )
    end = f", {FINISH_REASONS[generation.finish_reason]}" if generation.finish_reason else ""
    return Text(f"{generation.config.method}: {', '.join(counts)}{end}.", style="dim")


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
        before = _before(generation.text, span.start)
        table.add_row(str(number), Text(f"after “{before}”" if before else "at the start"), style="dim")
        for index, candidate in enumerate(span.candidates):
            kept = index == span.chosen
            table.add_row(
                "",
                Text(visible(candidate.text)),
                f"{candidate.log_prob:.2f}",
                f"{candidate.con_mlds:.3f}",
                f"{candidate.f_mlds:.3f}",
                f"{candidate.score:.2f}",
                _taken(kept, candidate.is_greedy),
                style="bold" if kept else "",
            )
    return table


def comparison(
    generation: Generation, other: Generation, *, scale: RiskScale | None = None, marks: bool = False
) -> RenderableType:
    """Another method's answer to the same prompt, dimmed up to where it parts from the first."""
    method = other.config.method
    if other.text == generation.text:
        return Text(f"{method} gives the same answer.", style="bold")
    same = _common_start(generation.text, other.text)
    where = f"parts after “{_before(other.text, same)}”" if same else "differs from the first word on"
    scale = scale or RiskScale.of([*generation.spans, *other.spans])
    text = Text().append(_safe(other.text[:same]), style="dim")
    text.append_text(spans_text(_spans_from(other.spans, same), scale=scale, marks=marks))
    return Group(Text.assemble((method, "bold"), (f" {where}:", "dim")), text)


def report(
    generation: Generation, *, compared: Generation | None = None, table: bool = False, marks: bool = False
) -> RenderableType:
    """An answer with its legend, and if asked what another method answers and the table of risk points."""
    both = [generation, compared] if compared else [generation]
    scale = RiskScale.of(span for one in both for span in one.spans)
    parts: list[RenderableType] = [answer_text(generation, scale=scale, marks=marks), Text()]
    if compared:
        parts = [Text(generation.config.method, style="bold"), *parts]
        parts += [comparison(generation, compared, scale=scale, marks=marks), Text()]
    if table and generation.usage.risk_points:
        parts += [risk_point_table(generation), Text()]
    parts += [legend(generation, scale=scale, marks=marks), *(summary(one) for one in both)]
    return Group(*parts)


def _append(text: Text, piece: str, level: int, marks: bool) -> None:
    """Appends one piece at a level; white space at its ends stays unmarked, so that words stand apart."""
    piece = _safe(piece)
    core = piece.strip()
    before, after = piece[: len(piece) - len(piece.lstrip())], piece[len(piece.rstrip()) :]
    if not level or not core:
        text.append(piece)
    elif marks:
        text.append(f"{before}[{core}|{level}]{after}")
    else:
        text.append(before).append(core, style=STYLES[level]).append(after)


def _safe(text: str) -> str:
    """The text with its control characters made visible: a terminal must not obey what a model wrote."""
    return text.translate(_CONTROLS)


def visible(text: str) -> str:
    """A span's text on one line, its outer spaces and its line ends visible."""
    text = _safe(text).replace("\n", "\\n").replace("\t", "\\t")
    if not text:
        return "(end)"
    core = text.strip(" ")
    before = len(text) - len(text.lstrip(" ")) if core else len(text)
    after = len(text) - before - len(core)
    return "␣" * before + core + "␣" * after


def _taken(kept: bool, greedy: bool) -> str:
    return "both" if kept and greedy else "kept" if kept else "greedy" if greedy else ""


def _before(text: str, offset: int, length: int = 24) -> str:
    """The last words before an offset, on one line."""
    words = _safe(" ".join(text[:offset].split()))
    if len(words) <= length:
        return words
    last = words[-length:]
    return "…" + (last.partition(" ")[2] or last)


def _common_start(a: str, b: str) -> int:
    """The number of characters at which two texts part, moved back to the start of a word of a spaced script."""
    same = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if any(text[same : same + 1].isspace() for text in (a, b)):
        return same
    word = max(a.rfind(" ", 0, same), a.rfind("\n", 0, same))
    return max(word, 0) if same - word <= 20 else same


def _spans_from(spans: Iterable[Span], offset: int) -> list[Span]:
    """The spans after an offset, the one that holds it cut."""
    return [
        span.model_copy(update={"text": span.text[max(0, offset - span.start) :]})
        for span in spans
        if span.end > offset
    ]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
