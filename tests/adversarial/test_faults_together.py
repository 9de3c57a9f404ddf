"""Many threads at once over one engine, most of which fail in some way: the others get their answers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cocoa_engine import Cancellation, CocoaEngine, CocoaError, Generation, PromptError, RequestCancelledError
from tests.helpers.engines import endless, prompt
from tests.helpers.in_threads import together
from tests.helpers.inside import assert_idle

JOBS = 96
TOKENS = 10


class RaisedError(Exception):
    """What a callback raises."""


def raising(after: int) -> Callable[..., Any]:
    """A logits processor that raises after some calls."""
    calls = iter(range(after))

    def process(input_ids: Any, scores: Any) -> Any:
        if next(calls, None) is None:
            raise RaisedError("a callback failed")
        return scores

    return process


def generated(engine: CocoaEngine, seed: int) -> Generation:
    return engine.generate(prompt(seed), max_new_tokens=TOKENS)


def streamed(engine: CocoaEngine, seed: int) -> Generation | None:
    stream = engine.stream(prompt(seed), max_new_tokens=TOKENS)
    list(stream)
    return stream.generation


def batched(engine: CocoaEngine, seed: int) -> Generation:
    _, answer = engine.generate_batch(["\ud800", prompt(seed)], max_new_tokens=TOKENS, return_exceptions=True)
    return answer


def closed_early(engine: CocoaEngine, seed: int) -> None:
    with engine.stream(prompt(seed), max_new_tokens=1000) as stream:
        next(stream)


def abandoned(engine: CocoaEngine, seed: int) -> None:
    stream = engine.stream(prompt(seed), max_new_tokens=1000)
    next(stream)
    del stream


def cancelled(engine: CocoaEngine, seed: int) -> Any:
    cancellation = Cancellation()
    timer = threading.Timer(0.001 * (seed % 7), cancellation.cancel)
    timer.start()
    try:
        return engine.generate(prompt(seed), max_new_tokens=5000, cancellation=cancellation)
    finally:
        timer.join(60)


def cancelled_at_once(engine: CocoaEngine, seed: int) -> Any:
    cancellation = Cancellation()
    cancellation.cancel()
    return list(engine.stream(prompt(seed), max_new_tokens=5000, cancellation=cancellation))


def failed(engine: CocoaEngine, seed: int) -> Any:
    return engine.generate(prompt(seed), max_new_tokens=200, logits_processor=[raising(seed % 9)])


def failed_at_a_criterion(engine: CocoaEngine, seed: int) -> Any:
    def criterion(*_: Any, **__: Any) -> bool:
        raise RaisedError("a criterion failed")

    return list(engine.stream(prompt(seed), max_new_tokens=200, stopping_criteria=[criterion]))


def with_bad_settings(engine: CocoaEngine, seed: int) -> Any:
    bad: list[dict[str, Any]] = [{"gamma": 2.0}, {"max_new_tokens": 0}, {"nonsense": 1}, {"stop": [5]}, {"method": "x"}]
    return engine.generate(prompt(seed), **bad[seed % len(bad)])


def with_a_bad_prompt(engine: CocoaEngine, seed: int) -> Any:
    bad: list[Any] = ["", None, [10**6], "\ud800", [5] * 10_000]
    return engine.generate(bad[seed % len(bad)])


ANSWERED = (generated, streamed, batched)
FAULTS: dict[Callable[..., Any], tuple[type[BaseException], ...]] = {
    closed_early: (),
    abandoned: (),
    cancelled: (RequestCancelledError,),
    cancelled_at_once: (RequestCancelledError,),
    failed: (RaisedError,),
    failed_at_a_criterion: (RaisedError,),
    with_bad_settings: (CocoaError,),
    with_a_bad_prompt: (PromptError,),
}


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_faults_do_not_reach_other_calls(max_batch_size: int) -> None:
    engine = endless(max_batch_size=max_batch_size)
    expected = {seed: generated(engine, seed).text for seed in range(6)}
    threads = set(threading.enumerate())
    dice = random.Random(max_batch_size)
    jobs = [(kind, dice.randrange(6)) for kind in dice.choices([*ANSWERED, *FAULTS], k=JOBS // 2)]
    outcomes: list[Any] = []
    for start in range(0, len(jobs), 16):
        some = jobs[start : start + 16]
        outcomes += together([partial(kind, engine, seed) for kind, seed in some])
    assert {kind for kind, _ in jobs} == {*ANSWERED, *FAULTS}
    for (kind, seed), outcome in zip(jobs, outcomes, strict=True):
        if kind in ANSWERED:
            assert isinstance(outcome, Generation), (kind.__name__, outcome)
            assert outcome.text == expected[seed]
        elif FAULTS[kind]:
            assert isinstance(outcome, FAULTS[kind]), (kind.__name__, outcome)
        else:
            assert outcome is None, (kind.__name__, outcome)
    assert_idle(engine)
    assert set(threading.enumerate()) <= threads
    assert generated(engine, 0).text == expected[0]
