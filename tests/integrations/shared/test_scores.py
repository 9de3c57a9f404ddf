"""The risk of an answer as a score."""

from __future__ import annotations

from typing import Any

from cocoa_integrations._shared.metadata import report_of
from cocoa_integrations.tracing import Scoring


def entry(number: int, text: str, risk: float, **more: Any) -> dict[str, Any]:
    return {"span": number, "text": text, "risk": risk, "kind": "regular", **more}


def test_only_the_visible_spans_of_the_answer_count() -> None:
    spans = [
        entry(0, "So", 0.9, part="reasoning"),
        entry(1, "Hello", 0.3, part="answer"),
        entry(2, "\n", 0.8, part="answer"),
    ]
    report = report_of(spans, method="sig", risk_source="calibrator")
    assert report["max_risk"] == 0.8
    scoring = Scoring(threshold=0.5)
    assert scoring.score(report) == 0.3
    assert scoring.label(report) == "pass"
    assert Scoring(threshold=0.3).label(report) == "fail"
    assert scoring.score(report_of(spans[2:], method="sig", risk_source="calibrator")) == 0.0
