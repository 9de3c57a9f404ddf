"""A timeline has the phases of a call in their order."""

from __future__ import annotations

import threading

import pytest

from cocoa_engine import CocoaEngine, Timeline
from tests.helpers.engines import engine_of, prompt
from tests.helpers.tiny_models import tiny_model


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    return engine_of(tiny_model("llama"), max_batch_size=1)


def in_order(timeline: Timeline) -> bool:
    times = [timeline.created, timeline.started, timeline.prompt_read, timeline.ended]
    known = [one for one in times if one is not None]
    return len(known) == 4 and known == sorted(known)


@pytest.mark.parametrize("method", ["cocoa-sig", "dola"])
def test_of_a_whole_answer_and_of_a_stream(tiny: CocoaEngine, method: str) -> None:
    whole, streamed = Timeline(), Timeline()
    assert (whole.queue_seconds, whole.prefill_seconds, whole.decode_seconds) == (None, None, None)
    answer = tiny.generate(prompt(1), max_new_tokens=6, method=method, dola_layers="1,2", timeline=whole)
    with tiny.stream(prompt(1), max_new_tokens=6, method=method, dola_layers="1,2", timeline=streamed) as stream:
        assert streamed.started is None
        spans = list(stream)
    assert spans == answer.spans
    assert in_order(whole)
    assert in_order(streamed)
    assert sum(each or 0 for each in (whole.queue_seconds, whole.prefill_seconds, whole.decode_seconds)) == (
        pytest.approx((whole.ended or 0) - whole.created)
    )


def test_a_waiting_call_has_not_started(tiny: CocoaEngine) -> None:
    timeline, scheduler = Timeline(), tiny.session.scheduler
    with scheduler.slot():
        call = threading.Thread(target=lambda: tiny.generate(prompt(2), max_new_tokens=2, timeline=timeline))
        call.start()
        while not scheduler.waiting:
            pass
        assert timeline.started is None
    call.join(60)
    assert in_order(timeline)


def test_chat_takes_one(engine: CocoaEngine) -> None:
    timeline = Timeline()
    engine.chat([{"role": "user", "content": "Hi"}], max_new_tokens=1, timeline=timeline)
    assert in_order(timeline)
