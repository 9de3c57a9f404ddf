"""The risk of an answer as a score."""

from __future__ import annotations

from cocoa_engine.report import RiskReport
from cocoa_integrations.tracing import Scoring
from tests.helpers.reports import made_report


def test_only_the_visible_spans_of_the_answer_count() -> None:
    texts, parts = ("So", "Hello", "\n"), ("reasoning", "answer", "answer")
    spans = [
        span.with_values(text=text, part=part)
        for span, text, part in zip(made_report([0.9, 0.3, 0.8]).spans, texts, parts, strict=True)
    ]
    report = RiskReport.of_spans(spans, risk_source="calibrator")
    assert report.max_risk == 0.8
    scoring = Scoring(threshold=0.5)
    assert scoring.score(report) == 0.3
    assert scoring.label(report) == "pass"
    assert Scoring(threshold=0.3).label(report) == "fail"
    assert scoring.score(RiskReport.of_spans(spans[2:])) == 0.0
