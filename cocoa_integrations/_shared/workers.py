"""Worker threads for async calls, one pool per engine."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from cocoa_engine import Cancellation, Runtime
from cocoa_engine.forks import call_in_child, free_in_child

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class HasRuntime(Protocol):
    """An engine, or a :class:`~cocoa_integrations._shared.loading.LazyEngine`."""

    @property
    def runtime(self) -> Runtime:
        """How the engine runs its model."""


_pools: WeakKeyDictionary[HasRuntime, ThreadPoolExecutor] = WeakKeyDictionary()
_running: set[Callable[[], object]] = set()
_lock = free_in_child(threading.Lock())
call_in_child(_pools.clear)  # their threads do not exist in the child
call_in_child(_running.clear)


async def in_worker(
    engine: HasRuntime, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Like ``asyncio.to_thread``, but in a thread pool that belongs to the engine.

    The default executor of an event loop has only a few threads more than there are cores. That can be too few to fill
    a batch, and other work of the application would wait in the same queue.

    If the task that waits is cancelled, so is what the call does without a cancellation of its own; see
    :meth:`Cancellation.run <cocoa_engine.Cancellation.run>`.
    """
    cancellation = Cancellation()
    in_context = partial(contextvars.copy_context().run, lambda: cancellation.run(call, *args, **kwargs))
    try:
        return await asyncio.get_running_loop().run_in_executor(_pool_of(engine), _counted, in_context)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise


def running() -> int:
    """The number of calls that worker threads work on."""
    return len(_running)


def _counted(call: Callable[[], Result]) -> Result:
    _running.add(call)
    try:
        return call()
    finally:
        _running.discard(call)


def _pool_of(engine: HasRuntime) -> ThreadPoolExecutor:
    """The pool of an engine. Its threads start as they are needed and end with the engine."""
    with _lock:
        if engine not in _pools:
            runtime = engine.runtime
            # one more than the engine admits, so that the engine refuses the excess call; the pool would queue it
            _pools[engine] = ThreadPoolExecutor(
                runtime.max_batch_size + runtime.max_queue + 1, thread_name_prefix="cocoa"
            )
        return _pools[engine]
