"""The claims and sentences of an answer, from the entries of ``cocoa_spans``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cocoa_engine import Check, Generation, MeasuredText, Unit
from cocoa_integrations._shared.finite import finite
from cocoa_integrations._shared.reasoning import CLOSING, Split


@dataclass(frozen=True)
class _Part:
    """A span of a report. Its tokens and candidates are not in it."""

    start: int
    end: int
    risk: float | None
    token_ends: Sequence[int] = ()
    token_log_probs: Sequence[float] = ()
    token_source_attention: Sequence[float] = ()
    token_copied: Sequence[int] = ()
    candidates: Sequence[Any] = ()
    chosen: int | None = None


def unit_entries(generation: Generation, split: Split | None = None) -> dict[str, Any]:
    """``check`` and ``sentences`` of the ``cocoa_risk`` report of a complete answer, without its reasoning."""
    begin = 0 if split is None else split.answer_start
    units = MeasuredText(generation.text, generation.spans, begin=begin, has_source=not generation.closed_book)
    return {
        "check": [check_entry(check) for check in units.check_these()],
        "sentences": [sentence_entry(sentence) for sentence in units.sentences],
    }


def check_entry(check: Check) -> dict[str, Any]:
    """One entry of ``check``."""
    return {**check.model_dump(), "risk": finite(check.risk)}


def sentence_entry(sentence: Unit) -> dict[str, Any]:
    """One entry of ``sentences``."""
    return {"start": sentence.start, "end": sentence.end, "risk": finite(sentence.risk)}


def units_of_spans(
    spans: Sequence[dict[str, Any]],
    level: Literal["claim", "sentence"],
    value: Callable[[dict[str, Any]], float | None],
) -> list[Unit] | None:
    """The claims or sentences of an answer, with the value of a metric as their risk, as thresholds are compared.

    Args:
        spans: consecutive entries of ``cocoa_spans`` that belong to the answer, not to its reasoning.
        level: ``claim`` or ``sentence``.
        value: the value of an entry.

    Returns:
        The units, or ``None`` if an entry has no text.
    """
    if any("text" not in span for span in spans):
        return None
    text = "".join(span["text"] for span in spans)
    parts = [_Part(span["end"] - len(span["text"]), span["end"], value(span)) for span in spans]
    offset = parts[0].start if parts else 0
    tag = text.find(CLOSING) if any("part" in span for span in spans) else -1
    begin = offset + tag + len(CLOSING) if tag >= 0 else 0
    return MeasuredText(text, parts, begin=begin, offset=offset).compared(level)
