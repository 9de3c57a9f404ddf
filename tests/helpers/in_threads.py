"""Calls run at the same time, each in a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

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
