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
    return {
        "schema": SCHEMA,
        "method": generation.config.method,
        "max_risk": generation.max_risk,
        "mean_risk": generation.mean_risk,
        "calibrated": generation.calibrated,
        "spans": all_spans(generation),
        "risk_points": generation.usage.risk_points,
    }
