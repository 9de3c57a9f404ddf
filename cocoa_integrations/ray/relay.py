"""The gateway's part of a request: it is handed to a replica, and its answer to the client.

A replica can end while it works: its machine fails, or it is killed for want of memory. As long as the client has seen
nothing of the answer, the request is restarted elsewhere. Otherwise the stream ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, MutableMapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from cocoa_engine.errors import CocoaError
from cocoa_engine.logs import safe_logger
from cocoa_integrations.ray.drain import Drain
from cocoa_integrations.ray.session import session_of
from cocoa_integrations.server.body import Bodies
from cocoa_integrations.server.errors import SERVER, ApiError, api_error, log_unexpected, response_of
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.server.streaming import error_event

logger = safe_logger("cocoa_integrations.ray")

PAUSE = 0.2
"""Seconds before the second attempt; each further pause is twice as long."""

_OF_GATEWAY = ("authorization",)


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
        retries: how often a request is restarted because its replica ended.
        retry_after: seconds after which a refused client should try again.
        log_prompts: also write messages of unexpected errors to the log, which may quote a prompt.
        drain: says when the gateway stops.
        bodies: reads the bodies of requests.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        retries: int = 2,
        retry_after: int = 1,
        log_prompts: bool = False,
        drain: Drain | None = None,
        bodies: Bodies | None = None,
    ) -> None:
        self._bodies = Bodies(ServerSettings().max_body_bytes) if bodies is None else bodies
        self._ask, self._retries, self._retry_after, self._log_prompts = ask, retries, retry_after, log_prompts
        self._drain = Drain(retry_after) if drain is None else drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. The replica's work ends when the client goes."""
        try:
            self._drain.require_open()
            async with self._bodies.read(receive) as body, self._bodies.turn(body):
                request = Forwarded(_plain(scope), body)
                session = await asyncio.to_thread(session_of, Headers(raw=request.scope["headers"]), body)
        except ApiError as error:
            await response_of(error)(scope, receive, send)
            return
        work = asyncio.ensure_future(self._until_the_end(request, session, scope, receive, send))
        left = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            left.cancel()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work

    async def _until_the_end(
        self, request: Forwarded, session: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        shown = _Shown(scope, receive, send)
        try:
            await self._drain.run(self._answer(request, session, shown))
        except ApiError as error:
            await shown.fail(error)

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
                    lost = ApiError(503, text, kind=SERVER, code="replica_lost", retry_after=self._retry_after)
                    await shown.fail(lost)
                    return
                shown.forget()
                await asyncio.sleep(PAUSE * 2**attempt)
            except Exception as error:
                refused = api_error(error, retry_after=self._retry_after)
                if refused.status == 500:
                    log_unexpected(error, with_message=self._log_prompts)
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
        "headers": [(name, value) for name, value in headers if name.decode("latin-1") not in _OF_GATEWAY],
        "client": None,
        "server": None,
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
