"""The one metadata schema of every adapter: ``cocoa_spans`` per chunk, ``cocoa_risk`` once per answer.

Plain Python values only, so that every framework can serialise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cocoa_engine import ContextLift, Generation, Span

SCHEMA = 1
SPANS_KEY = "cocoa_spans"
RISK_KEY = "cocoa_risk"
REPORTS_KEY = "cocoa_reports"
"""In LlamaIndex: the ``cocoa_risk`` of every answer that the model gave on the way to the last one."""


def span_metadata(span: Span, number: int) -> dict[str, Any]:
    """One entry of ``cocoa_spans``; ``number`` counts the answer's spans from 0.

    ``start`` and ``end`` are character offsets in the returned text. ``risk`` is in [0, 1] only if the report's
    ``calibrated`` is true; otherwise it is the raw MLDS of the configured metric. ``reaches_max_risk`` marks the span
    that ``max_risk`` stopped the answer at, which is then the last one.
    """
    return {
        "span": number,
        "start": span.start,
        "end": span.end,
        "text": span.text,
        "kind": span.kind,
        "con_mlds": span.con_mlds,
        "f_mlds": span.f_mlds,
        "log_prob": span.log_prob,
        "score": span.score,
        "risk": span.risk,
        "reaches_max_risk": span.reaches_max_risk,
        "candidates": len(span.candidates),
        "chosen": span.chosen,
    }


def all_spans(generation: Generation) -> list[dict[str, Any]]:
    """``cocoa_spans`` of a whole answer."""
    return [span_metadata(span, number) for number, span in enumerate(generation.spans)]


def risk_report(generation: Generation) -> dict[str, Any]:
    """The ``cocoa_risk`` report of a whole answer."""
    return report_of(
        all_spans(generation),
        method=generation.config.method,
        calibrated=generation.calibrated,
        answer_risk=generation.answer_risk,
    )


def report_of(
    spans: list[dict[str, Any]], *, method: str | None, calibrated: bool, answer_risk: float | None = None
) -> dict[str, Any]:
    """The ``cocoa_risk`` report of some ``cocoa_spans``; ``answer_risk`` takes a calibrator for answers."""
    risks = [span["risk"] for span in spans]
    return {
        "schema": SCHEMA,
        "method": method,
        "max_risk": max(risks, default=0.0),
        "mean_risk": sum(risks) / len(risks) if risks else 0.0,
        "calibrated": calibrated,
        "answer_risk": answer_risk,
        "spans": spans,
        "risk_points": sum(span["kind"] == "risk_point" for span in spans),
    }


def add_context_lift(spans: Sequence[dict[str, Any]], lifts: Sequence[ContextLift | None]) -> None:
    """Put into each of some ``cocoa_spans`` what the context changed of it: its figure with less that without.

    ``context_lift`` is that of ``log_prob``, in nats; ``con_mlds_lift`` and ``f_mlds_lift`` are those of the MLDS. All
    three are None for a span without a token of its own.
    """
    for span, lift in zip(spans, lifts, strict=True):
        span["context_lift"] = None if lift is None else lift.log_prob
        span["con_mlds_lift"] = None if lift is None else lift.con_mlds
        span["f_mlds_lift"] = None if lift is None else lift.f_mlds
