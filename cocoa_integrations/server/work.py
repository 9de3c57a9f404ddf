"""The work of a request, in the engine's worker threads, and the server-sent events of its answers."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from cocoa_engine import Cancellation, CocoaEngine
from cocoa_engine.confined import Budget, budget_of_request
from cocoa_engine.errors import EngineBusyError, RequestCancelledError
from cocoa_engine.integration import safe_logger
from cocoa_integrations._shared.engines import in_worker
from cocoa_integrations.server.errors import ApiError, at_most, client_gone, shutting_down

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Item = TypeVar("Item")

By = Literal["client", "shutdown"]
"""Who ended a call."""

DONE = b"data: [DONE]\n\n"

logger = safe_logger("cocoa_integrations.server")


class Call:
    """One request that the engine works on. ``on_cancel`` is told who cancelled it.

    It asks for ``answers`` answers, of which the engine decodes and queues ``most``. ``cancellation`` ends its work,
    before the next layer of a pass at the latest; pass it to every call of the engine. ``ended_by`` is who cancelled
    it.
    """

    def __init__(self, engine: CocoaEngine, on_cancel: Callable[[By], None]) -> None:
        self._on_cancel = on_cancel
        self.engine = engine
        self.answers, self.most = 0, engine.runtime.max_batch_size + engine.runtime.max_queue
        self.cancellation = Cancellation()
        self.ended_by: By | None = None

    def cancel(self, by: By) -> None:
        """End the work."""
        if self.ended_by is None:
            self.ended_by = by
            self._on_cancel(by)
        self.cancellation.cancel()

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Run a function in a worker thread of the engine. Raises :class:`ApiError` if the call was cancelled."""
        try:
            return await in_worker(self.engine, lambda: self.cancellation.run(function, *args, **kwargs))
        except RequestCancelledError:
            raise self.cancelled() from None

    def cancelled(self) -> ApiError:
        """The error of a cancelled call."""
        return shutting_down() if self.ended_by == "shutdown" else client_gone()


class Calls:
    """The calls that run or wait. The engine queues some; more are refused, as the engine itself does.

    A stream between two spans holds no batch slot, so the engine alone would admit more calls than it can serve.
    """

    def __init__(self, on_cancel: Callable[[By], None]) -> None:
        self._open: set[Call] = set()
        self._on_cancel = on_cancel
        self._slow, self._lock = 0, threading.Lock()

    @property
    def answers(self) -> int:
        """The number of answers that are being decoded or wait."""
        return sum(call.answers for call in self._open)

    def __len__(self) -> int:
        return len(self._open)

    def count(self, call: Call, answers: int, param: str = "n") -> None:
        """Count the answers that a call asks for; ``param`` is the parameter that does.

        It is refused if it has more than the engine runs and queues, alone or with the other calls.
        """
        at_most(answers, call.most, param, "answers")
        others = self.answers - call.answers
        if others + answers > call.most:
            raise EngineBusyError(
                f"the server is busy: it decodes or queues {others} answers, of at most {call.most}; try again later"
            )
        call.answers = answers

    @contextmanager
    def _compiling(self, call: Call) -> Iterator[None]:
        """The context of a call whose schema or grammar takes long. Such calls have half of all places at most."""
        with self._lock:
            if self._slow and self._slow + call.answers > call.most // 2:
                raise EngineBusyError("the server is busy with the schemas of other requests; try again later")
            self._slow += call.answers
        try:
            yield
        finally:
            with self._lock:
                self._slow -= call.answers

    @asynccontextmanager
    async def opened(self, engine: CocoaEngine, receive: Receive) -> AsyncIterator[Call]:
        """A call within the context, which counts as one answer. Leaving the context ends its work.

        So does the client when it goes, which ``receive`` tells. The body of the request must have been read.
        """
        call = Call(engine, self._on_cancel)
        self.count(call, 1)
        self._open.add(call)
        budget_of_request.set(Budget(partial(self._compiling, call)))  # of this task, and of threads that work for it

        async def watch() -> None:
            await gone(receive)
            call.cancel("client")

        watcher = asyncio.ensure_future(watch())
        try:
            yield call
        finally:
            watcher.cancel()
            call.cancellation.cancel()
            self._open.discard(call)

    def cancel(self) -> None:
        """End all calls, because the server shuts down."""
        for call in tuple(self._open):
            call.cancel("shutdown")


async def gone(receive: Receive) -> None:
    """Wait until the client of a request, whose body has been read, has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def interleaved(
    streams: Sequence[AsyncIterator[Item]], interval: float
) -> AsyncGenerator[tuple[int, Item] | None, None]:
    """The items of several streams as they come, with the number of their stream; raises the error of a stream.

    Whenever nothing has come for ``interval`` seconds, the item is ``None``. The other streams begin after the first
    item of the first one, so that they reuse its prompt.
    """
    waiting: dict[asyncio.Future[Item], int] = {asyncio.ensure_future(anext(streams[0])): 0}
    others = range(1, len(streams))
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=interval, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for future in done:
                number = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                waiting |= {asyncio.ensure_future(anext(streams[begun])): begun for begun in (number, *others)}
                others = range(0)
                yield number, item
    finally:
        for future in waiting:  # errors of the other streams are dropped; asyncio would log their messages
            future.cancel()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """A response of server-sent events, at whose end the resources of the request are released.

    If the client reads nothing for ``write_timeout`` seconds, the stream ends, and ``on_stalled`` is called.
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

        async def sent(message: Message) -> None:  # the buffers may be full, and the client not read
            await asyncio.wait_for(send(message), self._write_timeout)

        try:
            # released before the end of the response, after which the server says that the client has gone
            async with self._resources:
                await sent({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for chunk in self._events:
                    await sent({"type": "http.response.body", "body": chunk, "more_body": True})
            await sent({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.TimeoutError:
            logger.warning("a stream ended: its client read nothing for %g seconds", self._write_timeout)
            self._on_stalled()
