"""Many threads at once over one engine, most of which fail in some way: the others get their answers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cocoa_engine import Cancellation, CocoaEngine, CocoaError, Generation, PromptError, RequestCancelledError, Span
from tests.helpers.engines import endless, prompt
from tests.helpers.in_threads import together
from tests.helpers.inside import assert_idle

JOBS = 96
TOKENS = 10


class RaisedError(Exception):
    """What a callback raises."""


def raising(after: int) -> Callable[..., Any]:
    """A logits processor or criterion that raises after some calls."""
    calls = iter(range(after))

    def process(input_ids: Any, scores: Any, **_: Any) -> Any:
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


def abandoned(engine: CocoaEngine, seed: int) -> Span:
    return next(engine.stream(prompt(seed), max_new_tokens=1000))


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
    return list(engine.stream(prompt(seed), max_new_tokens=200, stopping_criteria=[raising(0)]))


def with_bad_settings(engine: CocoaEngine, seed: int) -> Any:
    bad: list[dict[str, Any]] = [{"gamma": 2.0}, {"max_new_tokens": 0}, {"nonsense": 1}, {"stop": [5]}, {"method": "x"}]
    return engine.generate(prompt(seed), **bad[seed % len(bad)])


def with_a_bad_prompt(engine: CocoaEngine, seed: int) -> Any:
    bad: list[Any] = ["", None, [10**6], "\ud800", [5] * 10_000]
    return engine.generate(bad[seed % len(bad)])


ANSWERED = (generated, streamed, batched)
FAULTS: dict[Callable[..., Any], type] = {
    closed_early: type(None),
    abandoned: Span,
    cancelled: RequestCancelledError,
    cancelled_at_once: RequestCancelledError,
    failed: RaisedError,
    failed_at_a_criterion: RaisedError,
    with_bad_settings: CocoaError,
    with_a_bad_prompt: PromptError,
}


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_faults_do_not_reach_other_calls(max_batch_size: int) -> None:
    engine = endless(max_batch_size=max_batch_size)
    expected = {seed: generated(engine, seed).text for seed in range(6)}
    threads = set(threading.enumerate())
    dice = random.Random(max_batch_size)
    jobs = [(kind, dice.randrange(6)) for kind in dice.choices([*ANSWERED, *FAULTS], k=JOBS // 2)]
    calls = [partial(kind, engine, seed) for kind, seed in jobs]
    outcomes = [outcome for start in range(0, len(calls), 16) for outcome in together(calls[start : start + 16])]
    assert {kind for kind, _ in jobs} == {*ANSWERED, *FAULTS}
    for (kind, seed), outcome in zip(jobs, outcomes, strict=True):
        assert isinstance(outcome, FAULTS.get(kind, Generation)), (kind.__name__, outcome)
        if kind in ANSWERED:
            assert outcome.text == expected[seed]
    assert_idle(engine)
    assert set(threading.enumerate()) <= threads
    assert generated(engine, 0).text == expected[0]
