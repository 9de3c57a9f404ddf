"""Async calls work in threads of the engine's own: enough to fill its batch and its queue, and one to be refused in."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextvars import ContextVar

import pytest

from cocoa_engine import Runtime
from cocoa_integrations._shared.workers import in_worker


class Runs:
    """What has threads; no model is needed for them."""

    runtime = Runtime(max_batch_size=30, max_queue=10)


async def test_as_many_at_the_same_time_as_the_engine_takes_and_one_more() -> None:
    runs, all_there = Runs(), threading.Barrier(41)
    arrived = await asyncio.gather(*(in_worker(runs, all_there.wait, 60) for _ in range(41)))
    assert sorted(arrived) == list(range(41))


async def test_the_loops_own_threads_stay_free() -> None:
    runs, go_on = Runs(), threading.Event()
    waiting = [asyncio.ensure_future(in_worker(runs, go_on.wait, 60)) for _ in range(40)]
    assert await asyncio.to_thread(lambda: "free") == "free"
    go_on.set()
    assert all(await asyncio.gather(*waiting))


async def test_the_context_goes_along() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    variable.set("outer")

    def inside(*, value: str) -> str:
        before = variable.get()
        variable.set(value)
        return before

    assert await in_worker(Runs(), inside, value="inner") == "outer"
    assert variable.get() == "outer"


@pytest.mark.slow
async def test_the_threads_go_with_the_engine() -> None:
    runs = Runs()
    thread = await in_worker(runs, threading.current_thread)
    assert thread.is_alive()
    del runs
    gc.collect()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
