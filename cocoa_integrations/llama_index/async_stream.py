"""A span stream read from an event loop without ever blocking it."""

from __future__ import annotations

from collections.abc import Callable

from cocoa_engine import CocoaEngine, Generation, Span, SpanStream
from cocoa_integrations.workers import in_worker


class AsyncSpanStream:
    """Reads a :class:`SpanStream` one span at a time, each in a worker thread.

    Nothing runs between two reads, so an abandoned stream does no further work; a read that is under way when the
    task is cancelled ends before its next forward pass.

    Use :meth:`open`.
    """

    def __init__(self, stream: SpanStream) -> None:
        self._stream = stream

    @classmethod
    async def open(cls, engine: CocoaEngine, start: Callable[[], SpanStream]) -> AsyncSpanStream:
        """Start a stream in a worker thread, since encoding a long prompt takes time too."""
        return cls(await in_worker(engine, start))

    @property
    def generation(self) -> Generation:
        """The whole answer, once the stream has been read to its end."""
        assert self._stream.generation is not None
        return self._stream.generation

    def __aiter__(self) -> AsyncSpanStream:
        return self

    async def __anext__(self) -> Span:
        span = await in_worker(self._stream.engine, next, self._stream, None)
        if span is None:
            raise StopAsyncIteration
        return span

    async def __aenter__(self) -> AsyncSpanStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop the work. Awaits nothing, so it is safe while cancelled."""
        self._stream.close()
