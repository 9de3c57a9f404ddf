"""The work of a request: run in the engine's worker threads, and cancelled when its client has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

from cocoa_engine import Cancellation, CocoaEngine
from cocoa_engine.confined import Budget, budget_of_request
from cocoa_engine.errors import EngineBusyError, RequestCancelledError
from cocoa_integrations._shared.workers import in_worker
from cocoa_integrations.server.errors import ApiError, at_most, shutting_down

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

By = Literal["client", "shutdown"]
"""Who ended a call."""


class Call:
    """One request that the engine works on.

    Attributes:
        engine: the engine.
        answers: the number of answers that it asks for.
        cancellation: ends the work, before the next layer of a pass at the latest. Pass it to every call of the engine.
        ended_by: who cancelled the call; ``None`` while it runs.

    Args:
        engine: the engine.
        on_cancel: is told who cancelled the call.
    """

    def __init__(self, engine: CocoaEngine, on_cancel: Callable[[By], None]) -> None:
        self._on_cancel = on_cancel
        self.engine = engine
        self.answers = 0
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
        """Run a function in a worker thread of the engine.

        Raises:
            ApiError: the call was cancelled.
        """
        try:
            return await in_worker(self.engine, lambda: self.cancellation.run(function, *args, **kwargs))
        except RequestCancelledError:
            raise self.cancelled() from None

    def cancelled(self) -> ApiError:
        """The error of a cancelled call."""
        if self.ended_by == "shutdown":
            return shutting_down(retry_after=1)
        return ApiError(499, "the client closed the connection", code="client_closed_request")

    async def watch(self, receive: Receive) -> None:
        """Cancel the work when the client has gone. The body of the request must have been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel("client")


class Calls:
    """The calls that run or wait. The engine queues some; more are refused, as the engine itself does.

    A stream between two spans holds no batch slot, so the engine alone would admit more calls than it can serve.

    Args:
        on_cancel: is told who ended a call before it was complete.
    """

    def __init__(self, on_cancel: Callable[[By], None] = lambda by: None) -> None:
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
        """Count the answers that a call asks for.

        Args:
            call: the call.
            answers: their number.
            param: the parameter that asks for them.

        Raises:
            EngineBusyError: the engine has as many calls as it runs and queues.
            ApiError: the call alone has more answers.
        """
        most = _most(call)
        at_most(answers, most, param, "answers")
        others = self.answers - call.answers
        if others + answers > most:
            raise EngineBusyError(
                f"the server is busy: it decodes or queues {others} answers, of at most {most}; try again later"
            )
        call.answers = answers

    @contextmanager
    def _compiling(self, call: Call) -> Iterator[None]:
        """The context of a call whose schema or grammar takes long. Such calls have half of all places at most.

        Raises:
            EngineBusyError: other such calls have them.
        """
        with self._lock:
            if self._slow and self._slow + call.answers > _most(call) // 2:
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

        Args:
            engine: the engine.
            receive: of the request, whose body has been read. It tells when the client goes.

        Raises:
            EngineBusyError: the engine has as many calls as it runs and queues.
        """
        call = Call(engine, self._on_cancel)
        self.count(call, 1)
        self._open.add(call)
        budget_of_request.set(Budget(partial(self._compiling, call)))  # of this task, and of threads that work for it
        watcher = asyncio.ensure_future(call.watch(receive))
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


def _most(call: Call) -> int:
    """The number of answers that an engine decodes and queues."""
    return call.engine.runtime.max_batch_size + call.engine.runtime.max_queue
