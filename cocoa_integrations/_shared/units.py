"""The claims and sentences of an answer, from the entries of ``cocoa_spans``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from cocoa_engine import MeasuredText, RiskSource, Unit
from cocoa_integrations._shared.finite import finite
from cocoa_integrations._shared.reasoning import CLOSING


@dataclass(frozen=True)
class _Part:
    """A span of a report. Its tokens and candidates are not in it."""

    start: int
    end: int
    risk: float | None
    risk_source: RiskSource | None = None
    flagged: bool = False
    token_ends: Sequence[int] = ()
    token_log_probs: Sequence[float] = ()
    token_source_attention: Sequence[float] = ()
    token_copied: Sequence[int] = ()
    candidates: Sequence[Any] = ()
    chosen: int | None = None


def unit_list(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """The entries of ``claims`` or ``sentences``."""
    return [{"start": one.start, "end": one.end, "risk": finite(one.risk)} for one in units]


def measured_text(
    spans: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]
) -> MeasuredText | None:
    """An answer whose claims and sentences have the value of a metric as their risk.

    Args:
        spans: consecutive entries of ``cocoa_spans`` that belong to the answer, not to its reasoning.
        value: the value of an entry.

    Returns:
        The answer, or ``None`` if an entry has no text.
    """
    if any("text" not in span for span in spans):
        return None
    text = "".join(span["text"] for span in spans)
    offset = spans[0]["end"] - len(spans[0]["text"]) if spans else 0
    # not their own offsets: in the text that is shown, marks may stand between them
    ends = list(accumulate((len(span["text"]) for span in spans), initial=offset))
    parts = [_Part(start, end, value(span)) for span, (start, end) in zip(spans, pairwise(ends), strict=True)]
    tag = text.find(CLOSING) if any("part" in span for span in spans) else -1
    begin = offset + tag + len(CLOSING) if tag >= 0 else 0
    return MeasuredText(text, parts, begin=begin, offset=offset)
