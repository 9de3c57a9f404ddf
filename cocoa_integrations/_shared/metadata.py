"""The metadata schema of all adapters: ``cocoa_spans`` per chunk, ``cocoa_risk`` once per answer.

All values are plain Python values, so every framework can serialise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cocoa_engine import ContextLift, Generation, Span

SCHEMA = 1
SPANS_KEY = "cocoa_spans"
RISK_KEY = "cocoa_risk"
REPORTS_KEY = "cocoa_reports"
"""In LlamaIndex: the ``cocoa_risk`` of every answer that the model gave for one response."""


def span_metadata(span: Span, number: int) -> dict[str, Any]:
    """One entry of ``cocoa_spans``; ``number`` counts the spans of the answer from 0.

    ``start`` and ``end`` are character offsets in the returned text. ``risk`` is in [0, 1] if ``calibrated`` of the
    report is true; otherwise it is the raw MLDS of the configured metric. ``reaches_max_risk`` is true for the span at
    which ``max_risk`` stopped the answer; it is the last span.
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
    """``cocoa_spans`` of a complete answer."""
    return [span_metadata(span, number) for number, span in enumerate(generation.spans)]


def risk_report(generation: Generation) -> dict[str, Any]:
    """The ``cocoa_risk`` report of a complete answer."""
    return report_of(
        all_spans(generation),
        method=generation.config.method,
        calibrated=generation.calibrated,
        answer_risk=generation.answer_risk,
        model_name=generation.model_name,
    )


def report_of(
    spans: list[dict[str, Any]],
    *,
    method: str | None,
    calibrated: bool,
    answer_risk: float | None = None,
    model_name: str | None = None,
) -> dict[str, Any]:
    """The ``cocoa_risk`` report of some ``cocoa_spans``; ``answer_risk`` needs a calibrator for answers."""
    risks = [span["risk"] for span in spans]
    return {
        "schema": SCHEMA,
        "method": method,
        **({} if model_name is None else {"model_name": model_name}),
        "max_risk": max(risks, default=0.0),
        "mean_risk": sum(risks) / len(risks) if risks else 0.0,
        "calibrated": calibrated,
        "answer_risk": answer_risk,
        "spans": spans,
        "risk_points": sum(span["kind"] == "risk_point" for span in spans),
    }


def add_context_lift(spans: Sequence[dict[str, Any]], lifts: Sequence[ContextLift | None]) -> None:
    """Add to each entry how the context changed the span: the value with the context minus the value without it.

    ``context_lift`` is the difference of ``log_prob``, in nats; ``con_mlds_lift`` and ``f_mlds_lift`` are those of the
    MLDS. All three are ``None`` for a span without tokens.
    """
    for span, lift in zip(spans, lifts, strict=True):
        span["context_lift"] = None if lift is None else lift.log_prob
        span["con_mlds_lift"] = None if lift is None else lift.con_mlds
        span["f_mlds_lift"] = None if lift is None else lift.f_mlds
