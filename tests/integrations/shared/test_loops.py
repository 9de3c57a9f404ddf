"""Spans say where an answer runs in a loop, and reports keep it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig
from cocoa_engine.decoding.result_builder import LONGEST, LOOP, is_loop
from cocoa_engine.report import RiskReport
from tests.helpers.mutations import fuzz
from tests.helpers.served import speaker

TOKENS = st.integers(0, 3)
LONG = CocoaConfig(max_new_tokens=60)


@fuzz(200)
@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, min_size=1, max_size=12), st.integers(0, 30))
def test_a_loop_is_one_sequence_over_and_over(before: list[int], unit: list[int], times: int) -> None:
    ids = [*before, *unit * times]
    units = [ids[-size:] * LOOP for size in range(1, LONGEST + 1)]
    assert is_loop(ids) == (len(ids) >= LOOP and any(ids[-LOOP:] == each[-LOOP:] for each in units))
    assert is_loop(ids) or len(unit) > LONGEST or len(unit) * times < LOOP


def test_spans_and_reports_say_that_they_repeat() -> None:
    engine = speaker(f"A red house. {'ab' * LOOP}")
    answer = engine.generate("hi", config=LONG)
    flags = [span.repeats for span in answer.spans]
    assert (flags[0], flags[-1], flags) == (False, True, sorted(flags))
    with engine.stream("hi", config=LONG) as stream:
        assert [span.repeats for span in stream] == flags
    for report in (RiskReport.of(answer), RiskReport.of(answer).compact()):
        assert report.to_dict()["spans"][-1]["repeats"] is True
        assert RiskReport.from_wire(report.to_dict()).spans[-1].repeats
    assert not any(span.repeats for span in speaker("A red house. It has no end.").generate("hi", config=LONG).spans)
