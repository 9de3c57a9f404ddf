"""Comparing the reports that callbacks collect, and those that come over HTTP, with those of answers."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cocoa_engine import Generation
from cocoa_engine.report import ReportEntry, RiskReport, SpanReport
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations._shared.tries import RetryPlan


def risk_report(generation: Generation, split: Split | None = None) -> dict[str, Any]:
    """The dict of the report of an answer; ``split`` separates its reasoning."""
    return (RiskReport.of(generation) if split is None else split.report(generation)).to_dict()


def all_spans(generation: Generation, split: Split | None = None) -> list[dict[str, Any]]:
    """The dicts of the spans of an answer."""
    spans: list[dict[str, Any]] = risk_report(generation, split)["spans"]
    return spans


def to_dicts(entries: Iterable[ReportEntry]) -> list[dict[str, Any]]:
    """The dicts of reports or of spans."""
    return [entry.to_dict() for entry in entries]


def without_run(reports: Iterable[RiskReport | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The dicts of reports without the id of their run, which only callbacks, collectors and events know."""
    dicts = [report.to_dict() if isinstance(report, RiskReport) else report for report in reports]
    return [{name: value for name, value in report.items() if name != "run_id"} for report in dicts]


def wire_report(generation: Generation) -> dict[str, Any]:
    """The adapters' report, with what the server adds."""
    report = risk_report(generation)
    report["spans"] = [{**span, "index": number} for number, span in enumerate(report["spans"])]
    return {**report, "finish_reason": generation.finish_reason, "verdict": generation.verdict}


def without_offsets(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The spans of a report without their offsets, which follow every change of its text."""
    return [{name: value for name, value in span.items() if name not in ("start", "end")} for span in report["spans"]]


def without_markers(text: str) -> str:
    """A text without the markers of its citations."""
    return re.sub(r" (\[\d+\])+", "", text)


def stand_in(text: str, entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the texts of entries stand at their offsets. Markers may stand inside of them."""
    return all(without_markers(text[one["start"] : one["end"]]) == one["text"] for one in entries)


def made_report(risks: Iterable[float | None], **values: Any) -> RiskReport:
    """The report of spans of one letter with these risks, flagged by the threshold of the report."""
    threshold = values.get("threshold")
    spans = [
        SpanReport(
            span=number,
            text="a",
            start=number,
            end=number + 1,
            kind="greedy",
            risk=risk,
            f_mlds=0.9,
            log_prob=-1.0,
            flagged=risk is not None and threshold is not None and risk >= threshold,
        )
        for number, risk in enumerate(risks)
    ]
    return RiskReport.of_spans(spans, **{"method": "cocoa-sig", "risk_source": "calibrator", **values})


def retry_plan(
    threshold: float | None = None, max_tries: int = 3, measure: Any = None, on_risk: Any = "keep"
) -> RetryPlan:
    """The plan of attempts that differ in alpha."""
    return RetryPlan(
        alpha=1.0,
        retriever=None,
        top_k=3,
        has_second=False,
        is_same=lambda step: not step,
        threshold=threshold,
        max_tries=max_tries,
        settings=None,
        alphas=None,
        top_k_growth=None,
        measure=measure,
        on_risk=on_risk,
        mark="[[{text}]]",
        answer="I don't know.",
    )
