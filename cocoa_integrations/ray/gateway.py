"""The gateway: it checks who calls, hands requests to replicas, and answers for all of them.

A replica can end while it works: its machine fails, or it is killed for want of memory. As long as the client has seen
nothing of the answer, the request is restarted elsewhere. Otherwise the stream ends with an error.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import CocoaError
from cocoa_engine.integration import safe_logger
from cocoa_integrations.server import errors
from cocoa_integrations.server.app import create_app
from cocoa_integrations.server.middleware import Bodies, guarded, only_paths
from cocoa_integrations.server.routes.info import LIVE, METRICS, OPEN_PATHS, READY, exposition
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.server.work import event, gone

logger = safe_logger("cocoa_integrations.ray")

PAUSE = 0.2
"""Seconds before the second attempt; each further pause is twice as long."""

MAX_LENGTH = 256
"""Of the name of a session. Longer ones are cut."""


class ReplicaLostError(CocoaError):
    """The replica that worked on a request has ended."""


@dataclass(frozen=True)
class Forwarded:
    """A request as it is sent to a replica: its scope, of plain values only, and its whole body."""

    scope: dict[str, Any]
    body: bytes


Ask = Callable[[Forwarded, "str | None"], AsyncGenerator[Message, None]]
"""Hands a request and its session to a replica, and yields the messages of ASGI that the replica's app sends.

It raises :class:`ReplicaLostError` if the replica ended, and :class:`~cocoa_engine.errors.EngineBusyError` if none has
a free slot."""


class Board(Collector):
    """The latest metrics of every replica. The replicas send them: one whose slots are taken cannot be asked.

    Those of a replica that has sent no others for ``max_age`` seconds are dropped: it has ended.
    """

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._latest: dict[str, tuple[float, Sequence[Metric]]] = {}

    def keep(self, replica: str, metrics: Sequence[Metric]) -> None:
        """Replace the metrics of a replica."""
        self._latest[replica] = (time.monotonic(), metrics)

    def collect(self) -> Iterator[Metric]:
        """One metric of each name, with the samples of all replicas, each with a label for its replica."""
        oldest = time.monotonic() - self._max_age
        self._latest = {replica: latest for replica, latest in self._latest.items() if latest[0] >= oldest}
        together: dict[str, Metric] = {}
        for replica, (_, metrics) in self._latest.items():
            for metric in metrics:
                merged = together.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
        yield from together.values()


class Drain:
    """The requests that a gateway works on. All methods are called in the event loop of the gateway."""

    def __init__(self, retry_after: int) -> None:
        self.retry_after = max(1, retry_after)
        self.running: set[asyncio.Future[None]] = set()
        self._begun = False

    def begin(self) -> None:
        """Refuse further requests. Those that run go on."""
        self._begun = True

    def end(self) -> None:
        """Refuse further requests, and end those that run."""
        self._begun = True
        for work in self.running:
            work.cancel()

    def require_open(self) -> None:
        """Refuse a request with an error of the protocol while the gateway stops."""
        if self._begun:
            raise errors.shutting_down(self.retry_after)

    def __len__(self) -> int:
        return len(self.running)


class Replica:
    """Answers requests that a gateway hands on, which has checked keys and hosts."""

    def __init__(self, engine: CocoaEngine, settings: ServerSettings) -> None:
        inside = settings.model_copy(update={"api_keys": (), "allow_no_key": True, "allowed_hosts": ("*",)})
        self._app = create_app(engine, inside)

    async def answer(self, request: Forwarded) -> AsyncGenerator[list[Message], None]:
        """The messages of ASGI that the app sends for a request, those together that were sent meanwhile.

        Closing the generator ends the work.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        closed = asyncio.Event()
        left = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if left:
                return left.pop()
            await closed.wait()
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
            closed.set()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work

    def metrics(self) -> list[Metric]:
        """The current values of the metrics."""
        return list(self._app.state.cocoa.metrics.registry.collect())


def gateway(
    ask: Ask,
    ready: Callable[[], Awaitable[int]],
    settings: ServerSettings,
    *,
    board: Board,
    drain: Drain,
    retries: int = 2,
) -> ASGIApp:
    """The ASGI app of a gateway.

    ``ask`` hands a request to one of the replicas, of which ``ready`` tells how many run. A request is restarted up to
    ``retries`` times because its replica ended.
    """
    bodies = Bodies(settings.max_body_bytes)

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def health(request: Request) -> Response:
        try:
            drain.require_open()
        except errors.ApiError as error:
            return errors.response_of(error)
        if count := await ready():
            return JSONResponse({"status": "ok", "replicas": count})
        message = "no replica takes calls; try again later"
        return errors.response_of(errors.ApiError(503, message, code="no_replica", retry_after=drain.retry_after))

    async def metrics(request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(board)
        return exposition(request, registry)

    async def relay(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from a replica, whose work ends when the client goes."""
        try:
            drain.require_open()
            async with bodies.read(receive) as body, bodies.turn(body):
                request = Forwarded(_plain(scope), body)
                session = await asyncio.to_thread(session_of, Headers(raw=request.scope["headers"]), body)
            drain.require_open()  # it may have been told to stop meanwhile
        except errors.ApiError as error:
            await errors.response_of(error)(scope, receive, send)
            return
        shown = _Shown(scope, receive, send)
        work = asyncio.ensure_future(answer(request, session, shown))
        drain.running.add(work)
        work.add_done_callback(drain.running.discard)
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
            await shown.fail(errors.shutting_down(drain.retry_after))

    async def answer(request: Forwarded, session: str | None, shown: _Shown) -> None:
        for attempt in range(retries + 1):
            try:
                async with aclosing(ask(request, session)) as messages:
                    async for message in messages:
                        await shown.take(message)
                return
            except ReplicaLostError as error:
                logger.warning("%s (attempt %d)", error, attempt + 1)
                if shown.text or attempt == retries:
                    text = "the replica that worked on this answer has ended; ask again"
                    await shown.fail(errors.ApiError(503, text, code="replica_lost", retry_after=settings.retry_after))
                    return
                shown.forget()
                await asyncio.sleep(PAUSE * 2**attempt)
            except Exception as error:
                refused = errors.api_error(error, retry_after=settings.retry_after)
                if refused.status == 500:
                    errors.log_unexpected(error, with_message=settings.log_prompts)
                await shown.fail(refused)
                return

    routes = [
        Route(LIVE, live),
        *(Route(path, health) for path in READY),
        Route(METRICS, metrics),
        Mount("/", relay),
    ]
    # Ray Serve opens the socket, so that the address in the settings alone does not say who can reach it
    only_this_machine = not (settings.api_keys or settings.allow_no_key)
    app = guarded(Starlette(routes=routes), settings, OPEN_PATHS, only_this_machine=only_this_machine)
    return only_paths(app)


class _Shown:
    """What the client has seen of an answer. A response that is not a stream is held until it is complete.

    ``text`` says whether an event of the answer was sent. Comments, the signs of life in a stream, do not count.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.text = self._begun = False
        self._scope, self._receive, self._send = scope, receive, send
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
            if Headers(raw=self._start["headers"]).get("content-type", "").startswith("text/event-stream"):
                await self._begin()
                self.text = self.text or not (part.startswith(b":") or not part)
                await self._send(message)
                return
            self._held += part
            if more:
                return
            if self._begun:  # as a stream, by an attempt before this one
                self._held = b"data: " + self._held + b"\n\n"
            await self._begin()
            await self._end(self._held)

    async def fail(self, error: errors.ApiError) -> None:
        """End with an error: in the stream, if there is one, otherwise as the response."""
        if self._begun:
            await self._end(event(errors.body_of(error)))
        else:
            await errors.response_of(error)(self._scope, self._receive, self._send)

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


def session_of(headers: Headers, body: bytes) -> str | None:
    """The session of a request. Requests of one session go to the same replica, as long as it has free slots.

    It is the header ``x-session-id``, or ``prompt_cache_key`` of the body. Without both, it is a digest of what the
    turns of a conversation have in common: the messages up to the first one of the user, and the tools. For other
    requests it is a digest of the prompt; `None` for those without one, which go to any replica.
    """
    if named := headers.get("x-session-id"):
        return named[:MAX_LENGTH]
    try:
        request = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None  # the replica says what is wrong
    if not isinstance(request, Mapping):
        return None
    if isinstance(named := request.get("prompt_cache_key"), str) and named:
        return named[:MAX_LENGTH]
    beginning, messages = request.get("prompt"), request.get("messages")
    if isinstance(messages, list) and messages:
        asks = (isinstance(message, Mapping) and message.get("role") == "user" for message in messages)
        count = next((number for number, is_user in enumerate(asks, 1) if is_user), len(messages))
        beginning = messages[:count], request.get("tools")
    return None if beginning is None else sha256(repr(beginning).encode(errors="replace")).hexdigest()[:32]
