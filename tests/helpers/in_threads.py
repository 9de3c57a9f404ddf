"""Calls run at the same time, each in a thread of its own, and processors of scores that call back or hold one up."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from cocoa_engine import CocoaEngine, Generation
from tests.helpers.tiny_models import EOS, prompt

PATIENCE = 120.0
"""Seconds after which a thread that has not ended is taken to be stuck."""


def start(call: Callable[[], Any], outcome: list[Any] | None = None) -> threading.Thread:
    """Begin a call; what it returns or raises is appended to ``outcome``."""

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            result = error
        if outcome is not None:
            outcome.append(result)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returns, or the exception that it raised (an interrupt too)."""
    barrier = threading.Barrier(len(calls))
    outcomes: list[list[Any]] = [[] for _ in calls]

    def begin(call: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        return call()

    join([start(lambda call=call: begin(call), own) for call, own in zip(calls, outcomes, strict=True)])
    return [outcome for (outcome,) in outcomes]


def wait_until(condition: Callable[[], bool], limit: float = PATIENCE, *, pause: float = 0.002) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(pause)
    raise AssertionError("the condition was not met in time")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Meets(StoppingCriteria):
    """Calls something after each token, which may say that the answer ends."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call
        self.tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        self.tokens += 1
        return bool(self.call(self.tokens))


class Asks(LogitsProcessor):
    """Calls something before each distribution, and changes nothing."""

    def __init__(self, call: Callable[[list[int]], Any]) -> None:
        self.call = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.call(input_ids[0].tolist())
        return scores


class Held:
    """A request that holds its batch slot until it is let go."""

    def __init__(self, engine: CocoaEngine, *, tokens: int = 6) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.outcome: list[Any] = []
        call = partial(engine.generate, prompt(0), max_new_tokens=tokens, logits_processor=Asks(self._wait))
        self.thread = start(call, self.outcome)
        assert self.inside.wait(60)

    def _wait(self, _: Any) -> None:
        self.inside.set()
        assert self.go_on.wait(60)

    def let_go(self) -> Generation:
        self.go_on.set()
        join([self.thread])
        return self.outcome[0]


class Dictated(LogitsProcessor):
    """Makes the model write tokens after a prompt of a length, then one token for ever."""

    def __init__(self, prompt_length: int, token_ids: list[int], then: int = EOS) -> None:
        self.prompt_length, self.token_ids, self.then = prompt_length, token_ids, then

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids.shape[1] - self.prompt_length
        token = self.token_ids[written] if written < len(self.token_ids) else self.then
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)


async def happens(condition: Any) -> None:
    """Wait until something is true that other threads or tasks bring about."""
    for _ in range(int(PATIENCE / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen")
