"""The one metadata schema of every adapter: ``cocoa_spans`` per chunk, ``cocoa_risk`` once per answer.

Plain Python values only, so that every framework can serialise them.
"""

from __future__ import annotations

from typing import Any

from cocoa_engine import Generation, Span

SCHEMA = 1
SPANS_KEY = "cocoa_spans"
RISK_KEY = "cocoa_risk"


def span_metadata(span: Span, number: int) -> dict[str, Any]:
    """One entry of ``cocoa_spans``; ``number`` counts the answer's spans from 0.

    ``start`` and ``end`` are character offsets in the returned text. ``risk`` is in [0, 1] only if the report's
    ``calibrated`` is true; otherwise it is the raw MLDS of the configured metric.
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
