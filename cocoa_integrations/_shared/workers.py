"""Work outside of the caller's thread: worker threads for async calls, and streams that end with their reader."""

import asyncio
import contextvars
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from typing_extensions import Self

from cocoa_engine import Cancellation, Runtime
from cocoa_engine.integration import free_in_child

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Item = TypeVar("Item", covariant=True)


class HasRuntime(Protocol):
    """An engine, or a :class:`~cocoa_integrations._shared.loading.LazyEngine`."""

    @property
    def runtime(self) -> Runtime:
        """How the engine runs its model."""


_pools: weakref.WeakKeyDictionary[HasRuntime, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
_running: set[object] = set()
_lock = free_in_child(threading.Lock())
if hasattr(os, "register_at_fork"):  # their threads do not exist in the child
    os.register_at_fork(after_in_child=_pools.clear)
    os.register_at_fork(after_in_child=_running.clear)


async def in_worker(
    engine: HasRuntime, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Like ``asyncio.to_thread``, but in a thread pool of the engine, which ends with the engine.

    The default executor of an event loop has only a few threads more than there are cores. That can be too few to fill
    a batch, and other work of the application would wait in the same queue.

    If the task that waits is cancelled, so is what the call does without a cancellation of its own; see
    :meth:`Cancellation.run <cocoa_engine.Cancellation.run>`.
    """
    cancellation = Cancellation()
    context = contextvars.copy_context()

    def counted() -> Result:
        _running.add(entry := object())  # a function that names itself would keep the engine until a gc
        try:
            return context.run(lambda: cancellation.run(call, *args, **kwargs))
        finally:
            _running.discard(entry)

    with _lock:
        if engine not in _pools:
            runtime = engine.runtime
            # one more than the engine admits, so that the engine refuses the excess call; the pool would queue it
            _pools[engine] = ThreadPoolExecutor(
                runtime.max_batch_size + runtime.max_queue + 1, thread_name_prefix="cocoa"
            )
        pool = _pools[engine]
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, counted)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise


def running() -> int:
    """The number of calls that worker threads work on."""
    return len(_running)


class ClosableIterator(Protocol[Item]):
    """A generator, or a :class:`~cocoa_engine.SpanStream`."""

    def __next__(self) -> Item:
        """The next item."""

    def close(self) -> None:
        """Stop the work."""


class AsyncStream(Generic[Result]):
    """Iterates over a synchronous stream, each step in a worker thread of the engine.

    The stream does no work between two steps, so an abandoned stream costs nothing. Use it as an async context manager,
    which closes the stream. A step that is running when the task is cancelled ends before the next layer of its
    pass, provided the stream's own ``close`` or its cancellation stops it. A cancellation ends what a step does outside
    of forward passes; by default, the end of the task that waits does.
    """

    def __init__(
        self, engine: HasRuntime, stream: ClosableIterator[Result], cancellation: Cancellation | None = None
    ) -> None:
        self._engine, self._stream = engine, stream
        # StopIteration cannot be raised into a future, so the end of the stream is a value: the stream itself
        step: Callable[[], Any] = partial(next, stream, stream)
        self._step = step if cancellation is None else partial(cancellation.run, step)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        item: Any = await in_worker(self._engine, self._step)
        if item is self._stream:
            raise StopAsyncIteration
        result: Result = item
        return result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the stream. Nothing is awaited, so this is safe while the task is being cancelled."""
        with suppress(ValueError):  # a worker thread is inside a generator, which cannot be closed from outside
            self._stream.close()
