"""Which source a part of an answer is cited from, and the markers in its text."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_engine.errors import ConfigError
from cocoa_engine.report import RiskReport, SpanReport
from cocoa_integrations._shared.citations import citations_of, citing, with_markers
from cocoa_integrations._shared.edits import EditedText
from tests.helpers.reports import stand_in, to_dicts


def entries(*texts: str) -> list[SpanReport]:
    starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
    return [
        SpanReport(start=start, end=start + len(text), text=text, kind="greedy", risk=0.1, log_prob=-1.0)
        for start, text in zip(starts, texts, strict=True)
    ]


def test_the_source_that_raised_a_part_most() -> None:
    spans = entries("The tower", " of Hald", "en", " is", " old.", "")
    lifts = [[0.1, 0.2], [2.0, 0.5], [1.0, None], [0.0, 0.0], [-1.0, 3.0], [5.0, 5.0]]
    citations, spans = citations_of(spans, lifts, 1.0)
    assert [(one.source, one.text, one.lift, one.spans) for one in citations] == [
        (1, " of Halden", 3.0, [1, 2]),
        (2, " old.", 3.0, [4]),
    ]
    assert [span.source for span in spans] == [None, 1, 1, None, 2, None]
    assert spans[2].source_lifts == [1.0, None]


def test_neighbours_with_one_source_are_one_citation() -> None:
    spans = entries("The tower", " is old", " and red", ".")
    citations, _ = citations_of(spans, [[2.0], [3.0], [0.0], [4.0]], 1.0)
    assert [(one.start, one.end, one.lift) for one in citations] == [(0, 16, 5.0), (24, 25, 4.0)]


@pytest.mark.parametrize("lifts", [[[], []], [[None], [None]], [[0.5], [0.9]]])
def test_no_source(lifts: list[list[float | None]]) -> None:
    assert citations_of(entries("The", " tower"), lifts, 1.0)[0] == []


def test_markers_move_the_offsets() -> None:
    spans = entries("The tower ", "is old.", " Yes", "")
    citations, spans = citations_of(spans, [[2.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]], 1.0)
    change = with_markers(EditedText("The tower is old. Yes"), citations, RiskReport.of_spans(spans))
    text, spans, citations = change.text, change.moved(spans), change.moved(citations)
    assert text == "The tower is old [1][2]. Yes"
    assert stand_in(text, to_dicts(spans))
    assert stand_in(text, to_dicts(citations))
    assert spans[-1].start == len(text)


@pytest.mark.parametrize("value", ["1", True, float("nan")])
def test_the_lowest_lift_is_a_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="min_lift takes a finite number"):
        citing(None, value, None)
