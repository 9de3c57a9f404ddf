"""The metadata schema of all adapters: ``cocoa_spans`` per chunk, ``cocoa_risk`` once per answer.

All values are plain Python values, so every framework can serialise them. A number that is not finite is ``None``:
JSON has no other form of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cocoa_engine import ContextLift, Generation, RiskSource, Span
from cocoa_integrations._shared.finite import finite, is_unmeasured
from cocoa_integrations._shared.reasoning import Part, Split
from cocoa_integrations._shared.units import unit_entries

SCHEMA = 1
SPANS_KEY = "cocoa_spans"
RISK_KEY = "cocoa_risk"
REPORTS_KEY = "cocoa_reports"
"""In LlamaIndex: the ``cocoa_risk`` of every answer that the model gave for one response."""


def span_metadata(span: Span, number: int, part: Part | None = None) -> dict[str, Any]:
    """One entry of ``cocoa_spans``; ``number`` counts the spans of the answer from 0.

    ``part`` says whether the span belongs to the reasoning or the answer; it is left out if the model did not reason.
    ``start`` and ``end`` are character offsets in the returned text. ``risk`` is in [0, 1]; ``risk_source`` of the
    report says where it comes from. ``flagged`` says whether it reaches ``threshold`` of the report.
    ``reaches_max_risk`` is true for the span at which ``max_risk`` stopped the answer; it is the last span.
    """
    risk = finite(span.risk)
    entry: dict[str, Any] = {
        "span": number,
        "start": span.start,
        "end": span.end,
        "text": span.text,
        "kind": span.kind,
        "con_mlds": finite(span.con_mlds),
        "f_mlds": finite(span.f_mlds),
        "log_prob": finite(span.log_prob),
        "score": finite(span.score),
        "risk": risk,
        # it reaches every threshold; a risk of None that is not flagged was not measured
        "flagged": span.flagged or (risk is None and span.risk is not None),
        "source_attention": finite(span.source_attention),
        **({"passage_attention": list(map(finite, span.passage_attention))} if span.passage_attention else {}),
        "reaches_max_risk": span.reaches_max_risk,
        "candidates": len(span.candidates),
        "chosen": span.chosen,
    }
    if span.out_of_domain:
        entry["out_of_domain"] = True
    if span.repeats:
        entry["repeats"] = True
    return entry if part is None else {**entry, "part": part}


def all_spans(generation: Generation, split: Split | None = None) -> list[dict[str, Any]]:
    """``cocoa_spans`` of a complete answer; ``split`` separates its reasoning."""
    return [
        span_metadata(span, number, None if split is None else split.part(number))
        for number, span in enumerate(generation.spans)
    ]


def risk_report(generation: Generation, split: Split | None = None) -> dict[str, Any]:
    """The ``cocoa_risk`` report of a complete answer; ``split`` separates its reasoning."""
    answered = generation if split is None else split.answered
    report = report_of(
        all_spans(generation, split),
        method=generation.config.method,
        risk_source=generation.risk_source,
        threshold=generation.threshold,
        answer_risk=answered.answer_risk,
        answer_threshold=generation.answer_threshold,
        model_name=generation.model_name,
    )
    if answered.out_of_domain:
        report["out_of_domain"] = True
    if generation.source_heads is not None:
        report["source_heads"] = generation.source_heads
    if split is not None and "reasoning" in report:
        report["reasoning"]["answer_start"] = split.answer_start
    return {**report, **unit_entries(generation, split)}


def report_of(
    spans: list[dict[str, Any]],
    *,
    method: str | None,
    risk_source: RiskSource | None,
    threshold: float | None = None,
    answer_risk: float | None = None,
    answer_threshold: float | None = None,
    model_name: str | None = None,
) -> dict[str, Any]:
    """The ``cocoa_risk`` report of some ``cocoa_spans``; ``answer_risk`` needs a calibrator for answers.

    The values of the report are those of the answer. If the model reasoned, ``reasoning`` has those of the reasoning.
    """
    counted = _risk_of([span for span in spans if not is_reasoning(span)])
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "method": method,
        **({} if model_name is None else {"model_name": model_name}),
        "max_risk": counted["max_risk"],
        "mean_risk": counted["mean_risk"],
        "risk_source": risk_source,
        "calibrated": risk_source == "calibrator",
        "threshold": threshold,
        "answer_risk": finite(answer_risk),
        "answer_threshold": answer_threshold,
        "spans": spans,
        "risk_points": counted["risk_points"],
    }
    if any("part" in span for span in spans):
        thoughts = [span for span in spans if is_reasoning(span)]
        report["reasoning"] = {**_risk_of(thoughts), "spans": [span["span"] for span in thoughts]}
    return report


def begin_of(report: Mapping[str, Any]) -> int:
    """The offset, among those of a report, of the first character of the text that is shown, after any reasoning."""
    begin: int = report.get("reasoning", {}).get("answer_start", 0)
    return begin


def is_reasoning(span: dict[str, Any]) -> bool:
    """Whether an entry of ``cocoa_spans`` belongs to the reasoning."""
    return span.get("part") == "reasoning"


def _risk_of(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    risks = [finite(span["risk"]) for span in spans if not is_unmeasured(span)]
    known = [risk for risk in risks if risk is not None]
    unknown = len(known) < len(risks)  # neither the highest nor the mean is known then
    return {
        "max_risk": None if unknown else max(known, default=0.0),
        "mean_risk": None if unknown else sum(known) / len(known) if known else 0.0,
        "risk_points": sum(span["kind"] == "risk_point" for span in spans),
    }


def add_context_lift(spans: Sequence[dict[str, Any]], lifts: Sequence[ContextLift | None]) -> None:
    """Add to each entry how the context changed the span: the value with the context minus the value without it.

    ``context_lift`` is the difference of ``log_prob``, in nats; ``con_mlds_lift`` and ``f_mlds_lift`` are those of the
    MLDS. All three are ``None`` for a span without tokens.
    """
    for span, lift in zip(spans, lifts, strict=True):
        span["context_lift"] = None if lift is None else finite(lift.log_prob)
        span["con_mlds_lift"] = None if lift is None else finite(lift.con_mlds)
        span["f_mlds_lift"] = None if lift is None else finite(lift.f_mlds)
