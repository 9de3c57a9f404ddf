"""The metadata schema of all adapters: ``cocoa_spans`` per chunk, ``cocoa_risk`` once per answer.

All values are plain Python values, so every framework can serialise them. A number that is not finite is ``None``:
JSON has no other form of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cocoa_engine import ContextLift, Generation, Span
from cocoa_engine.report import Part, RiskReport, SpanReport
from cocoa_integrations._shared.finite import finite
from cocoa_integrations._shared.reasoning import Split

SPANS_KEY = "cocoa_spans"
RISK_KEY = "cocoa_risk"
REPORTS_KEY = "cocoa_reports"
"""In LlamaIndex: the ``cocoa_risk`` of every answer that the model gave for one response."""


def span_metadata(span: Span, number: int, part: Part | None = None) -> dict[str, Any]:
    """One entry of ``cocoa_spans``; ``number`` counts the spans of the answer from 0."""
    return SpanReport.of(span, number, part).to_dict()


def all_spans(generation: Generation, split: Split | None = None) -> list[dict[str, Any]]:
    """``cocoa_spans`` of a complete answer; ``split`` separates its reasoning."""
    spans: list[dict[str, Any]] = risk_report(generation, split)["spans"]
    return spans


def risk_report(generation: Generation, split: Split | None = None) -> dict[str, Any]:
    """The ``cocoa_risk`` report of a complete answer; ``split`` separates its reasoning."""
    report = RiskReport.of(generation) if split is None else split.report(generation)
    return report.to_dict()


def report_of(spans: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """The ``cocoa_risk`` report of some ``cocoa_spans``; ``answer_risk`` needs a calibrator for answers."""
    return RiskReport.of_spans([SpanReport.from_wire(span) for span in spans], **values).to_dict()


def begin_of(report: Mapping[str, Any]) -> int:
    """The offset, among those of a report, of the first character of the text that is shown, after any reasoning."""
    begin: int = report.get("reasoning", {}).get("answer_start", 0)
    return begin


def is_reasoning(span: dict[str, Any]) -> bool:
    """Whether an entry of ``cocoa_spans`` belongs to the reasoning."""
    return span.get("part") == "reasoning"


def add_context_lift(spans: Sequence[dict[str, Any]], lifts: Sequence[ContextLift | None]) -> None:
    """Add to each entry how the context changed the span: the value with the context minus the value without it.

    ``context_lift`` is the difference of ``log_prob``, in nats; ``con_mlds_lift`` and ``f_mlds_lift`` are those of the
    MLDS. All three are ``None`` for a span without tokens.
    """
    for span, lift in zip(spans, lifts, strict=True):
        span["context_lift"] = None if lift is None else finite(lift.log_prob)
        span["con_mlds_lift"] = None if lift is None else finite(lift.con_mlds)
        span["f_mlds_lift"] = None if lift is None else finite(lift.f_mlds)
