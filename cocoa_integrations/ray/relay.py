"""A request between a gateway and a replica: where it should go, its part in the gateway, and in the replica.

A replica can end while it works: its machine fails, or it is killed for want of memory. As long as the client has seen
nothing of the answer, the request is restarted elsewhere. Otherwise the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import CocoaError
from cocoa_engine.logs import safe_logger
from cocoa_integrations.server.app import create_app
from cocoa_integrations.server.errors import SERVER, ApiError, api_error, log_unexpected, response_of, shutting_down
from cocoa_integrations.server.middleware import Bodies
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.server.work import error_event, gone

if TYPE_CHECKING:
    from prometheus_client import Metric

HEADER = "x-session-id"
"""With it a client names its session."""

MAX_LENGTH = 256
"""Of the name of a session. Longer ones are cut."""


def session_of(headers: Headers, body: bytes) -> str | None:
    """The session of a request. Requests of one session go to the same replica, as long as it has free slots.

    It is the header ``x-session-id``, or ``prompt_cache_key`` of the body. Without both, it is a digest of what the
    turns of a conversation have in common: the messages up to the first one of the user, and the tools. For other
    requests it is a digest of the prompt; `None` for those without one, which go to any replica.
    """
    if named := headers.get(HEADER):
        return named[:MAX_LENGTH]
    try:
        request = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None  # the replica says what is wrong
    if not isinstance(request, Mapping):
        return None
    if isinstance(named := request.get("prompt_cache_key"), str) and named:
        return named[:MAX_LENGTH]
    beginning = _beginning(request)
    return None if beginning is None else sha256(repr(beginning).encode(errors="replace")).hexdigest()[:32]


def _beginning(request: Mapping[str, Any]) -> Any:
    messages = request.get("messages")
    if isinstance(messages, list) and messages:
        first: list[Any] = []
        for message in messages:
            first.append(message)
            if isinstance(message, Mapping) and message.get("role") == "user":
                break
        return first, request.get("tools")
    return request.get("prompt")


class Drain:
    """The requests that a gateway works on. All methods are called in the event loop of the gateway."""

    def __init__(self, retry_after: int) -> None:
        self.retry_after = max(1, retry_after)
        self._running: set[asyncio.Future[None]] = set()
        self._begun = False

    def begin(self) -> None:
        """Refuse further requests. Those that run go on."""
        self._begun = True

    def end(self) -> None:
        """Refuse further requests, and end those that run."""
        self._begun = True
        for work in self._running:
            work.cancel()

    def require_open(self) -> None:
        """Refuse a request while the gateway stops.

        Raises:
            ApiError: the gateway stops.
        """
        if self._begun:
            raise shutting_down(self.retry_after)

    def hold(self, work: asyncio.Future[None]) -> None:
        """Count the work of a request until it is done."""
        self._running.add(work)
        work.add_done_callback(self._running.discard)

    def __len__(self) -> int:
        return len(self._running)


class Replica:
    """Answers requests that a gateway hands on.

    Args:
        engine: the engine.
        settings: the settings of the server. The gateway has checked keys and hosts.
    """

    def __init__(self, engine: CocoaEngine, settings: ServerSettings) -> None:
        inside = settings.model_copy(update={"api_keys": (), "allow_no_key": True, "allowed_hosts": ("*",)})
        self._app = create_app(engine, inside)

    async def answer(self, request: Forwarded) -> AsyncGenerator[list[Message], None]:
        """The messages of ASGI that the app sends for a request, those together that were sent meanwhile.

        Closing the generator ends the work.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        left = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if left:
                return left.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._app(dict(request.scope), receive, sent.put))
        work.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            more = True
            while more:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                more = messages[-1] is not None
                yield [message for message in messages if message is not None]
            work.result()
        finally:
            gone.set()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work

    def metrics(self) -> list[Metric]:
        """The current values of the metrics."""
        return list(self._app.state.cocoa.metrics.registry.collect())


logger = safe_logger("cocoa_integrations.ray")

PAUSE = 0.2
"""Seconds before the second attempt; each further pause is twice as long."""


class ReplicaLostError(CocoaError):
    """The replica that worked on a request has ended."""


@dataclass(frozen=True)
class Forwarded:
    """A request as it is sent to a replica.

    Attributes:
        scope: of ASGI, plain values only.
        body: the whole body.
    """

    scope: dict[str, Any]
    body: bytes


Ask = Callable[[Forwarded, "str | None"], AsyncGenerator[Message, None]]
"""Hands a request and its session to a replica, and yields the messages of ASGI that the replica's app sends.

It raises :class:`ReplicaLostError` if the replica ended, and :class:`~cocoa_engine.errors.EngineBusyError` if none has
a free slot."""


class Relay:
    """An ASGI app whose answers come from replicas.

    Args:
        ask: hands a request to a replica.
        settings: those of the server.
        retries: how often a request is restarted because its replica ended.
        drain: says when the gateway stops.
    """

    def __init__(self, ask: Ask, settings: ServerSettings, *, retries: int, drain: Drain) -> None:
        self._ask, self._settings, self._retries, self._drain = ask, settings, retries, drain
        self._bodies = Bodies(settings.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. The replica's work ends when the client goes."""
        try:
            self._drain.require_open()
            async with self._bodies.read(receive) as body, self._bodies.turn(body):
                request = Forwarded(_plain(scope), body)
                session = await asyncio.to_thread(session_of, Headers(raw=request.scope["headers"]), body)
            self._drain.require_open()  # it may have been told to stop meanwhile
        except ApiError as error:
            await response_of(error)(scope, receive, send)
            return
        shown = _Shown(scope, receive, send)
        work = asyncio.ensure_future(self._answer(request, session, shown))
        self._drain.hold(work)
        left = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            has_gone = not work.done()
        finally:
            left.cancel()
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()
        elif not has_gone:
            await shown.fail(shutting_down(self._drain.retry_after))

    async def _answer(self, request: Forwarded, session: str | None, shown: _Shown) -> None:
        for attempt in range(self._retries + 1):
            try:
                async with aclosing(self._ask(request, session)) as messages:
                    async for message in messages:
                        await shown.take(message)
                return
            except ReplicaLostError as error:
                logger.warning("%s (attempt %d)", error, attempt + 1)
                if shown.text or attempt == self._retries:
                    text = "the replica that worked on this answer has ended; ask again"
                    after = self._settings.retry_after
                    await shown.fail(ApiError(503, text, kind=SERVER, code="replica_lost", retry_after=after))
                    return
                shown.forget()
                await asyncio.sleep(PAUSE * 2**attempt)
            except Exception as error:
                refused = api_error(error, retry_after=self._settings.retry_after)
                if refused.status == 500:
                    log_unexpected(error, with_message=self._settings.log_prompts)
                await shown.fail(refused)
                return


class _Shown:
    """What the client has seen of an answer. A response that is not a stream is held until it is complete.

    Attributes:
        text: whether an event of the answer was sent. Comments, the signs of life in a stream, do not count.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.text = False
        self._scope, self._receive, self._send = scope, receive, send
        self._begun = False
        self.forget()

    def forget(self) -> None:
        """Drop what the client has not seen: the request is restarted."""
        self._start: MutableMapping[str, Any] = {}
        self._held = b""

    async def take(self, message: Message) -> None:
        """Take the next message of a replica's app."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            part, more = message.get("body", b""), message.get("more_body", False)
            if self._streams:
                await self._begin()
                self.text = self.text or not (part.startswith(b":") or not part)
                await self._send(message)
                return
            self._held += part
            if more:
                return
            if self._begun:  # as a stream, by an attempt before this one
                await self._end(b"data: " + self._held + b"\n\n")
            else:
                await self._begin()
                await self._end(self._held)

    async def fail(self, error: ApiError) -> None:
        """End with an error: in the stream, if there is one, otherwise as the response."""
        if self._begun:
            await self._end(error_event(error))
        else:
            await response_of(error)(self._scope, self._receive, self._send)

    @property
    def _streams(self) -> bool:
        return Headers(raw=self._start["headers"]).get("content-type", "").startswith("text/event-stream")

    async def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            await self._send(self._start)

    async def _end(self, body: bytes) -> None:
        self.text = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _plain(scope: Scope) -> dict[str, Any]:
    """What a replica needs of a scope. The API key stays here."""
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    return {
        **{name: scope.get(name) for name in ("type", "method", "query_string", "http_version")},
        "path": path,
        "raw_path": path.encode(),
        "scheme": scope.get("scheme", "http"),
        "root_path": "",
        "headers": [(name, value) for name, value in headers if name != b"authorization"],
        "client": None,
        "server": None,
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
