"""Spans say where an answer runs in a loop, in the engine and at every door."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig
from cocoa_engine.decoding.result_builder import LONGEST, LOOP, is_loop
from cocoa_integrations.langchain import ChatCocoa, get_spans
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.server import create_app
from tests.helpers.mutations import fuzz
from tests.helpers.reports import to_dicts
from tests.helpers.served import post, speaker

TOKENS = st.integers(0, 3)
LONG = CocoaConfig(max_new_tokens=60)


@fuzz(200)
@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, min_size=1, max_size=12), st.integers(0, 30))
def test_a_loop_is_one_sequence_over_and_over(before: list[int], unit: list[int], times: int) -> None:
    ids = [*before, *unit * times]
    units = [ids[-size:] * LOOP for size in range(1, LONGEST + 1)]
    assert is_loop(ids) == (len(ids) >= LOOP and any(ids[-LOOP:] == each[-LOOP:] for each in units))
    assert is_loop(ids) or len(unit) > LONGEST or len(unit) * times < LOOP


def test_spans_say_that_they_repeat() -> None:
    engine = speaker(f"A red house. {'ab' * LOOP}")
    flags = [span.repeats for span in engine.generate("hi", config=LONG).spans]
    assert (flags[0], flags[-1], flags) == (False, True, sorted(flags))
    with engine.stream("hi", config=LONG) as stream:
        assert [span.repeats for span in stream] == flags
    assert not any(span.repeats for span in speaker("A red house. It has no end.").generate("hi", config=LONG).spans)


def test_every_door_shows_it() -> None:
    engine = speaker("ab" * LOOP)

    def last(spans: Any) -> Any:
        return spans[-1].get("repeats")

    message = ChatCocoa(engine=engine, max_tokens=40).invoke("hi")
    compact = ChatCocoa(engine=engine, max_tokens=40, risk_metadata="compact").invoke("hi")
    response = CocoaLLM(engine=engine, max_new_tokens=40).complete("hi")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
    served = asyncio.run(post(create_app(engine), body, "/v1/chat/completions")).json()["choices"][0]["message"]
    reports = [response.raw["cocoa_risk"], served["cocoa_risk"], {"spans": to_dicts(get_spans(compact))}]
    assert last(to_dicts(get_spans(message))) is True
    assert [last(report["spans"]) for report in reports] == [True] * 3
