"""Comparing the reports that callbacks collect, and those that come over HTTP, with those of answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cocoa_engine import Generation
from cocoa_integrations._shared.metadata import risk_report


def without_run(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports without the id of their run, which only callbacks, collectors and events know."""
    return [{name: value for name, value in report.items() if name != "run_id"} for report in reports]


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
