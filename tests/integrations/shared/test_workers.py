"""Async calls work in threads of the engine's own: enough to fill its batch and its queue, and one to be refused in."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from cocoa_engine import EngineBusyError, Runtime
from cocoa_integrations._shared.workers import in_worker
from tests.helpers.engines import engine_of, prompt
from tests.helpers.in_threads import wait_until
from tests.helpers.inside import assert_idle
from tests.helpers.processors import Held
from tests.helpers.tiny_models import tiny_model


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


async def test_many_tasks_are_told_that_the_engine_is_busy() -> None:
    engine = engine_of(tiny_model("llama"), max_batch_size=1, max_queue=2)
    held = Held(engine)
    tasks = [asyncio.ensure_future(in_worker(engine, engine.generate, prompt(n), max_new_tokens=3)) for n in range(8)]
    await asyncio.to_thread(wait_until, lambda: sum(task.done() for task in tasks) == 6)
    await asyncio.to_thread(held.let_go)
    outcomes: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(outcome, EngineBusyError) for outcome in outcomes) == 6
    assert sum(not isinstance(outcome, Exception) for outcome in outcomes) == 2
    assert_idle(engine)
