"""Threads of an engine's own for the work of async calls."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from cocoa_engine import Runtime

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Runs(Protocol):
    """An engine, or the promise of one."""

    @property
    def runtime(self) -> Runtime:
        """How it runs the model."""


_workers: WeakKeyDictionary[Runs, ThreadPoolExecutor] = WeakKeyDictionary()
_guard = threading.Lock()


async def in_worker(engine: Runs, call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """As ``asyncio.to_thread``, in a thread that does nothing but this engine's work.

    The event loop's own threads are a few only, by the number of cores: they could not fill a batch, let alone the
    queue, and whatever else an application does in them would wait behind the model.
    """
    within = partial(contextvars.copy_context().run, call, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_workers_of(engine), within)


def _workers_of(engine: Runs) -> ThreadPoolExecutor:
    """The threads come one by one as they are needed, and go with the engine."""
    with _guard:
        if engine not in _workers:
            runtime = engine.runtime
            # one more than the engine takes: its call is refused, rather than kept in a queue without an end
            most = runtime.max_batch_size + runtime.max_queue + 1
            _workers[engine] = ThreadPoolExecutor(most, thread_name_prefix="cocoa")
        return _workers[engine]
