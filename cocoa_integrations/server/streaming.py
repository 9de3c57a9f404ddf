"""Server-sent events: the chunks of several answers as they come, signs of life between them, and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Generic, TypeVar

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from cocoa_engine.logs import safe_logger
from cocoa_integrations.server.errors import ApiError, body_of

logger = safe_logger("cocoa_integrations.server")

Item = TypeVar("Item")

DONE = b"data: [DONE]\n\n"


class Interleaved(Generic[Item]):
    """The items of several streams as they come, with the number of their stream.

    Whenever nothing has come for a while, the item is ``None``. The other streams begin after the first item of the
    first one, so that they reuse its prompt.

    Args:
        streams: the streams.
        interval: seconds without an item after which there is a ``None``.
    """

    def __init__(self, streams: Sequence[AsyncIterator[Item]], interval: float) -> None:
        self._streams, self._interval = streams, interval
        self._waiting: dict[asyncio.Future[Item], int] = {}
        self._ready: list[asyncio.Future[Item]] = []
        self._begun = 0

    def __aiter__(self) -> Interleaved[Item]:
        return self

    async def __anext__(self) -> tuple[int, Item] | None:
        """The next item.

        Raises:
            Exception: that of a stream.
        """
        if not self._begun:
            self._begin(0)
        while True:
            if not self._ready:
                if not self._waiting:
                    raise StopAsyncIteration
                done, _ = await asyncio.wait(self._waiting, timeout=self._interval, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return None
                self._ready.extend(done)
            future = self._ready.pop()
            number = self._waiting.pop(future)
            try:
                item = future.result()
            except StopAsyncIteration:
                continue
            self._next(number)
            while self._begun < len(self._streams):
                self._begin(self._begun)
            return number, item

    def close(self) -> None:
        """Stop waiting. Errors of the other streams are dropped; asyncio would log their messages."""
        for future in (*self._waiting, *self._ready):
            future.cancel()
            future.add_done_callback(lambda one: one.cancelled() or one.exception())

    def _begin(self, number: int) -> None:
        self._begun = number + 1
        self._next(number)

    def _next(self, number: int) -> None:
        following: Awaitable[Item] = anext(self._streams[number])
        self._waiting[asyncio.ensure_future(following)] = number


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """A comment, which clients ignore. It keeps a connection from timing out."""
    return f": {text}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """An error inside a stream. Clients of OpenAI raise it."""
    return event(body_of(error))


class EventStream(Response):
    """A response of server-sent events. The resources of the request are released when it ends.

    Args:
        events: the events.
        resources: what is released at the end.
        write_timeout: seconds after which the stream ends if the client does not read.
        on_stalled: is called in this case.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        resources: AsyncExitStack,
        write_timeout: float,
        on_stalled: Callable[[], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._resources = events, resources
        self._write_timeout, self._on_stalled = write_timeout, on_stalled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            # released before the end of the response, after which the server says that the client has gone
            async with self._resources:
                await self._sent(send, start)
                async for one in self._events:
                    await self._sent(send, {"type": "http.response.body", "body": one, "more_body": True})
            await self._sent(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.TimeoutError:
            logger.warning("a stream ended: its client read nothing for %g seconds", self._write_timeout)
            self._on_stalled()

    async def _sent(self, send: Send, message: Message) -> None:
        """Send a message.

        Raises:
            asyncio.TimeoutError: the buffers are full, and the client does not read.
        """
        await asyncio.wait_for(send(message), self._write_timeout)
