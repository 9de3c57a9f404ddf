"""Comparing answers, their reports and their costs, but for rounding."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from cocoa_engine import Candidate, Generation, Span, SpanStream
from cocoa_engine.report import ReportEntry, RiskReport, SpanReport

ROUNDING = 1e-4
"""The largest relative difference that the kernels promise between passes of other shapes, or other processors."""


def near(figures: Any) -> Any:
    """Equal to figures, a list or a dictionary of them, but for rounding."""
    return pytest.approx(figures, abs=ROUNDING, rel=ROUNDING)


def is_near(one: Any, other: Any) -> bool:
    """Whether two figures, or two lists of them, are near: faster than :func:`near`, for thousands of them."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_near, one, other))
    return one == other or math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)


def assert_alike(a: Generation, b: Generation) -> None:
    """The same tokens, spans and choices; figures are near."""
    assert (a.text, a.token_ids, a.finish_reason, a.config) == (b.text, b.token_ids, b.finish_reason, b.config)
    for x, y in zip(a.spans, b.spans, strict=True):
        assert (x.text, x.start, x.end, x.kind, x.chosen) == (y.text, y.start, y.end, y.kind, y.chosen)
        _assert_alike(x, y)
        for one, other in zip(x.candidates, y.candidates, strict=True):
            assert (one.text, one.is_greedy) == (other.text, other.is_greedy)
            _assert_alike(one, other)


def _assert_alike(a: Span | Candidate, b: Span | Candidate) -> None:
    assert a.token_ids == b.token_ids
    for name in ("token_log_probs", "token_entropies", "token_margins", "con_mlds", "f_mlds", "log_prob", "score"):
        assert is_near(getattr(a, name), getattr(b, name)), name


def answers(result: Any) -> list[Generation]:
    """Whatever a call returned, as a list."""
    if isinstance(result, SpanStream):
        spans = list(result)
        assert result.generation is not None
        assert spans == result.generation.spans
        return [result.generation]
    return result if isinstance(result, list) else [result]


def assert_all_alike(some: Any, others: Any) -> None:
    for one, other in zip(answers(some), answers(others), strict=True):
        assert_alike(one, other)


def close(a: Any, b: Any) -> bool:
    """Whether two nested reports are the same, their numbers near."""
    if isinstance(a, ReportEntry) and isinstance(b, ReportEntry):
        return close(a.to_dict(), b.to_dict())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == near(b)) if isinstance(a, float) else bool(a == b)


def token_counts(usage: Any) -> dict[str, int]:
    """LangChain's token counts of an answer, without what was reused: that depends on the calls before."""
    return {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}


def without_reuse(generation_info: dict[str, Any]) -> dict[str, Any]:
    """The ``generation_info`` of LangChain's text model with :func:`token_counts` as its usage."""
    return {**generation_info, "usage_metadata": token_counts(generation_info["usage_metadata"])}


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers give the same tokens for every text and every chat."""
    written = [each.backend_tokenizer.to_str() for each in (one, other)]
    return (
        written[0] == written[1]
        and type(one) is type(other)
        and one.special_tokens_map == other.special_tokens_map
        and one.chat_template == other.chat_template
        and one.model_max_length == other.model_max_length
    )


def risk_report(generation: Generation, split: Any = None) -> dict[str, Any]:
    """The dict of the report of an answer; ``split`` separates its reasoning."""
    return (RiskReport.of(generation) if split is None else split.report(generation)).to_dict()


def all_spans(generation: Generation, split: Any = None) -> list[dict[str, Any]]:
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
