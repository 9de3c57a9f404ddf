"""Async calls and streams work in threads of the engine's own: as many as fill its batch and queue, and one more."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from cocoa_engine import Runtime
from cocoa_integrations._shared.engines import AsyncStream, in_worker


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


async def test_the_items_come_in_order_from_worker_threads_and_leaving_the_stream_closes_it() -> None:
    closed: list[bool] = []
    threads: list[str] = []

    def steps() -> Iterator[int]:
        try:
            for number in range(3):
                threads.append(threading.current_thread().name)
                yield number
        finally:
            closed.append(True)

    async with AsyncStream(Runs(), steps()) as stream:
        assert [item async for item in stream] == [0, 1, 2]
    assert closed == [True]
    assert all(name.startswith("cocoa") for name in threads)
    async with AsyncStream(Runs(), steps()) as stream:
        assert await anext(stream) == 0
        assert closed == [True]
    assert closed == [True, True]


async def test_an_error_reaches_the_reader() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise ValueError("broken")

    async with AsyncStream(Runs(), failing()) as stream:
        assert await anext(stream) == 0
        with pytest.raises(ValueError, match="broken"):
            await anext(stream)


async def test_cancellation_during_a_step_is_not_hidden() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        entered.set()
        go_on.wait(60)
        yield 0

    async def read() -> None:
        async with AsyncStream(Runs(), slow()) as stream:
            await anext(stream)

    task = asyncio.ensure_future(read())
    await asyncio.to_thread(entered.wait, 60)
    task.cancel()  # a worker thread is inside the generator, which cannot be closed from outside
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()


async def test_nothing_of_a_call_waits_for_the_garbage_collector() -> None:
    runs, given = Runs(), Runs()
    there = weakref.ref(given)
    gc.disable()
    try:
        await in_worker(runs, lambda runs: None, given)
        del given
        for _ in range(200):  # the thread may still be on its way out of the call
            if there() is not None:
                await asyncio.sleep(0.01)
        assert there() is None
    finally:
        gc.enable()
