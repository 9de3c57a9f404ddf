"""Many threads at once over one engine, most of which fail in some way: the others get their answers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cocoa_engine import Cancellation, CocoaEngine, CocoaError, Generation, PromptError, RequestCancelledError, Span
from tests.helpers.alike import answers
from tests.helpers.engines import endless, prompt
from tests.helpers.in_threads import together
from tests.helpers.inside import assert_idle

JOBS = 48
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


def batched(engine: CocoaEngine, seed: int) -> Generation:
    prompts = ["\ud800", prompt(seed)]
    return engine.generate_batch(prompts, max_new_tokens=TOKENS, return_exceptions=True)[1]


def closed_early(engine: CocoaEngine, seed: int) -> None:
    with engine.stream(prompt(seed), max_new_tokens=1000) as stream:
        next(stream)


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


SETTINGS = {"gamma": 2.0, "max_new_tokens": 0, "nonsense": 1, "stop": [5], "method": "x"}
BAD_SETTINGS = [{name: value} for name, value in SETTINGS.items()]
BAD_PROMPTS: list[Any] = ["", None, [10**6], "\ud800", [5] * 10_000]
ANSWERED: dict[Callable[..., Any], type] = {
    generated: Generation,
    lambda engine, seed: answers(engine.stream(prompt(seed), max_new_tokens=TOKENS))[0]: Generation,
    batched: Generation,
}
KINDS: dict[Callable[..., Any], type] = {
    **ANSWERED,
    closed_early: type(None),
    lambda engine, seed: next(engine.stream(prompt(seed), max_new_tokens=1000)): Span,
    cancelled: RequestCancelledError,
    cancelled_at_once: RequestCancelledError,
    lambda engine, seed: engine.generate(prompt(seed), logits_processor=[raising(seed % 9)]): RaisedError,
    lambda engine, seed: list(engine.stream(prompt(seed), stopping_criteria=[raising(0)])): RaisedError,
    lambda engine, seed: engine.generate(prompt(seed), **BAD_SETTINGS[seed % 5]): CocoaError,
    lambda engine, seed: engine.generate(BAD_PROMPTS[seed % 5]): PromptError,
}


@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_faults_do_not_reach_other_calls(max_batch_size: int) -> None:
    engine = endless(max_batch_size=max_batch_size)
    expected = {seed: generated(engine, seed).text for seed in range(6)}
    threads = set(threading.enumerate())
    dice = random.Random(max_batch_size)
    jobs = [(kind, dice.randrange(6)) for kind in dice.choices([*KINDS], k=JOBS)]
    calls = [partial(kind, engine, seed) for kind, seed in jobs]
    outcomes = [outcome for start in range(0, len(calls), 16) for outcome in together(calls[start : start + 16])]
    assert {kind for kind, _ in jobs} == KINDS.keys()
    for (kind, seed), outcome in zip(jobs, outcomes, strict=True):
        assert isinstance(outcome, KINDS[kind]), outcome
        if kind in ANSWERED:
            assert outcome.text == expected[seed]
    assert_idle(engine)
    assert set(threading.enumerate()) <= threads
    assert generated(engine, 0).text == expected[0]
