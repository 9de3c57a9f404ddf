"""One async stream serves every adapter: its steps run in worker threads, and leaving it closes the stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cocoa_engine import Runtime
from cocoa_integrations._shared.async_stream import AsyncStream


class Engine:
    """Has a pool of worker threads."""

    runtime = Runtime(max_batch_size=1, max_queue=1)


def steps(closed: list[bool], threads: list[str]) -> Iterator[int]:
    try:
        for number in range(3):
            threads.append(threading.current_thread().name)
            yield number
    finally:
        closed.append(True)


async def test_the_items_come_in_order_from_worker_threads() -> None:
    closed: list[bool] = []
    threads: list[str] = []
    async with AsyncStream(Engine(), steps(closed, threads)) as stream:
        assert [item async for item in stream] == [0, 1, 2]
    assert closed == [True]
    assert all(name.startswith("cocoa") for name in threads)


async def test_leaving_the_stream_closes_it() -> None:
    closed: list[bool] = []
    async with AsyncStream(Engine(), steps(closed, [])) as stream:
        assert await anext(stream) == 0
        assert not closed
    assert closed == [True]


async def test_an_error_reaches_the_reader() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise ValueError("broken")

    async with AsyncStream(Engine(), failing()) as stream:
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
        async with AsyncStream(Engine(), slow()) as stream:
            await anext(stream)

    task = asyncio.ensure_future(read())
    await asyncio.to_thread(entered.wait, 60)
    task.cancel()  # a worker thread is inside the generator, which cannot be closed from outside
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
