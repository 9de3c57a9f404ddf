"""A stream of the engine, read from an event loop without blocking it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import Self

from cocoa_engine import Cancellation
from cocoa_integrations._shared.workers import HasRuntime, in_worker

Item = TypeVar("Item")
_END = object()
Item_co = TypeVar("Item_co", covariant=True)


class ClosableIterator(Protocol[Item_co]):
    """A generator, or a :class:`~cocoa_engine.SpanStream`."""

    def __next__(self) -> Item_co:
        """The next item."""

    def close(self) -> None:
        """Stop the work."""


class AsyncStream(Generic[Item]):
    """Iterates over a synchronous stream, each step in a worker thread of the engine.

    The stream does no work between two steps, so an abandoned stream costs nothing. Use it as an async context manager,
    which closes the stream. A step that is running when the task is cancelled ends before the next layer of its
    pass, provided the stream's own ``close`` or its cancellation stops it. A cancellation ends what a step does outside
    of forward passes; by default, the end of the task that waits does.
    """

    def __init__(
        self, engine: HasRuntime, stream: ClosableIterator[Item], cancellation: Cancellation | None = None
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._run = None if cancellation is None else cancellation.run

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        # StopIteration cannot be raised into a future, so the end of the stream is a value
        step = partial(next, self._stream, _END)
        item: Any = await in_worker(self._engine, step if self._run is None else partial(self._run, step))
        if item is _END:
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the stream. Nothing is awaited, so this is safe while the task is being cancelled."""
        with suppress(ValueError):  # a worker thread is inside a generator, which cannot be closed from outside
            self._stream.close()
