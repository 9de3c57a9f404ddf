"""A timeline has the phases of a call in their order."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_engine import CocoaConfig, CocoaEngine, Timeline
from tests.helpers.engines import engine_of, prompt
from tests.helpers.in_threads import join, start, wait_until
from tests.helpers.tiny_models import tiny_model


def in_order(timeline: Timeline) -> bool:
    times = [timeline.created, timeline.started, timeline.prompt_read, timeline.ended]
    known = [one for one in times if one is not None]
    return len(known) == 4 and known == sorted(known)


@pytest.mark.parametrize("method", ["cocoa-sig", "dola"])
def test_of_a_whole_answer_and_of_a_stream(method: Any) -> None:
    tiny, whole, streamed = engine_of(tiny_model("llama")), Timeline(), Timeline()
    assert (whole.queue_seconds, whole.prefill_seconds, whole.decode_seconds) == (None, None, None)
    config = CocoaConfig(max_new_tokens=6, method=method, dola_layers="1,2")
    answer = tiny.generate(prompt(1), config=config, timeline=whole)
    with tiny.stream(prompt(1), config=config, timeline=streamed) as stream:
        assert streamed.started is None
        spans = list(stream)
    assert spans == answer.spans
    assert in_order(whole)
    assert in_order(streamed)
    assert sum(each or 0 for each in (whole.queue_seconds, whole.prefill_seconds, whole.decode_seconds)) == (
        pytest.approx((whole.ended or 0) - whole.created)
    )


def test_a_waiting_call_has_not_started() -> None:
    tiny, timeline = engine_of(tiny_model("llama"), max_batch_size=1), Timeline()
    scheduler = tiny.session.scheduler
    with scheduler.slot():
        call = start(lambda: tiny.generate(prompt(2), max_new_tokens=2, timeline=timeline))
        wait_until(lambda: bool(scheduler.waiting))
        assert timeline.started is None
    join([call])
    assert in_order(timeline)


def test_chat_takes_one(engine: CocoaEngine) -> None:
    timeline = Timeline()
    engine.chat([{"role": "user", "content": "Hi"}], max_new_tokens=1, timeline=timeline)
    assert in_order(timeline)
