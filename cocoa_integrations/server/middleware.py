"""What stands before the routes: URLs, trusted hosts, keys, unexpected errors, and the size and reading of bodies.

It is pure ASGI middleware: FastAPI's own ``BaseHTTPMiddleware`` would hide from a route that its client has gone.
"""

import asyncio
import gc
import hashlib
import json
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from hmac import compare_digest
from itertools import islice
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cocoa_engine.errors import shortened
from cocoa_integrations.server import errors
from cocoa_integrations.server.settings import ServerSettings, is_loopback

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"))


def only_paths(app: ASGIApp) -> ASGIApp:
    """Drop what a URL has beside its path: the query and the host with its user, in which clients put keys.

    No route reads them. An unknown method gets OpenTelemetry's name of one. The scope itself is changed, since the
    server's access log is written from it.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["query_string"] = b""
            if scope["method"] not in METHODS:
                scope["method"] = "_OTHER"
            if not scope["path"].startswith("/"):  # h11 passes on the other forms as they are
                _, absolute, location = scope["path"].partition("://")
                scope["path"] = f"/{location.partition('/')[2]}" if absolute else "*"
                scope["raw_path"] = scope["path"].encode()
        await app(scope, receive, send)

    return serve


def guarded(
    app: ASGIApp, settings: ServerSettings, open_paths: Collection[str], *, only_this_machine: bool = False
) -> ASGIApp:
    """Refuse requests of strangers, and bodies above the limit; answer errors that nothing else handles; serve HEAD.

    The header ``Host`` must name this server: a page that a browser shows could send requests to another name of the
    machine. A body must have one length, and the rest of one that is too large is not read. ``open_paths`` need no key.
    """
    limit, hosts = settings.max_body_bytes, {host.lower().strip("[]") for host in settings.known_hosts}
    digests = [hashlib.sha256(key.get_secret_value().encode()).digest() for key in settings.api_keys]
    message = f"the body is larger than {limit} bytes; send less, or start the server with --max-body-bytes"
    too_large = partial(errors.ApiError, 413, message, code="request_too_large")

    async def require(scope: Scope, receive: Receive) -> None:
        client, headers = scope.get("client"), Headers(scope=scope)
        if only_this_machine and not (client and is_loopback(client[0])):
            message = (
                "this server has no API key and serves only programs of its own machine: set COCOA_API_KEYS, or "
                "allow_no_key if something else checks who calls"
            )
            raise errors.ApiError(403, message, code="no_api_key")
        host = headers.get("host", "").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if not hosts & {"*", name}:
            raise errors.ApiError(
                400, f"the host {name!r} is not served; allow it with --allowed-host", code="unknown_host"
            )
        if digests and str(scope["path"]).removeprefix(scope.get("root_path", "")) not in open_paths:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            sent = hashlib.sha256(key.strip().encode("latin-1")).digest()
            # all are compared, so that the time does not tell which one fits
            fits = [compare_digest(sent, digest) for digest in digests]
            if scheme.lower() != "bearer" or not any(fits):
                message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
                raise errors.ApiError(401, message, code="invalid_api_key")
        declared = headers.get("content-length", "0")
        if "content-length" in headers and "transfer-encoding" in headers:  # not every parser refuses it
            left, more = limit, True
            while more and left > 0:  # closed before, the connection would be reset, and the answer be lost
                part = await receive()
                left, more = left - len(part.get("body", b"")), part.get("more_body", False)
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            raise errors.ApiError(400, message, code="malformed_request")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        is_head, begun, size = scope["method"] == "HEAD", False, 0

        async def counting() -> Message:
            nonlocal size
            part = await receive()
            size += len(part.get("body", b""))
            if size > limit:
                raise too_large()
            return part

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send({**message, "body": b""} if is_head and message["type"] == "http.response.body" else message)

        try:
            await require(scope, receive)
            await app({**scope, "method": "GET"} if is_head else scope, counting, noting)
        except Exception as error:
            shown = errors.api_error(error)
            if shown is not error:
                errors.log_unexpected(error, with_message=settings.log_prompts)
            if begun:  # the server closes the connection, and logs the error with its message
                raise ConnectionAbortedError("a response was cut off by an error") from None
            response = errors.response_of(shown)
            if shown.code == "malformed_request":
                response.headers["connection"] = "close"
            await response(scope, receive, send)
        except asyncio.CancelledError:  # the server stops, and does not wait for a long forward pass
            if not begun:
                await errors.response_of(errors.shutting_down())(scope, receive, send)
            raise

    return serve


LARGE = 2**16
"""Bytes above which a body is large. A smaller one is parsed in a few milliseconds."""

_PATIENCE, _HURRY = 10.0, 1.0
"""Seconds in which the next 64 KiB of a large body must come: usually, and while other bodies wait for memory."""

_NOT_AN_OBJECT = (
    "the body is missing or is not JSON: send a JSON object, with the header Content-Type: application/json"
)


class Bodies:
    """Reads bodies with bounded memory, and lets one large body at a time be parsed.

    A body that does not come keeps no other waiting: it holds only its own bytes, and is dropped if they are needed.
    Parsing holds the lock of the interpreter, and its result can take 40 times the memory of the body. ``at_once``
    bodies of the maximum size fit the memory, and as many may go beyond it.
    """

    def __init__(self, max_bytes: int, at_once: int = 8) -> None:
        self._at_once, self._most, self._held = at_once, at_once * max_bytes, 0
        self._coming: dict[object, None] = {}  # the large bodies of which more comes, in their order
        self._complete = self._waiting = 0
        self._freed, self._parsed = asyncio.Event(), asyncio.Semaphore(1)

    @asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes]:
        """A whole body within the context. An error of the protocol if the client has gone, or sends too slowly."""
        parts: list[bytes] = []
        key, size, more, counted, waited = object(), 0, True, 0, 0.0
        try:
            while more:
                if size <= LARGE:
                    message = await receive()
                else:
                    self._coming[key] = None
                    await self._room(key, size)
                    message, waited = await self._part(receive, waited)
                if message["type"] == "http.disconnect":
                    raise errors.client_gone()
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size >= counted + LARGE:
                    self._held += size - counted
                    counted, waited = size, 0.0
            self._coming.pop(key, None)
            self._complete += 1
            try:
                yield b"".join(parts)
            finally:
                self._complete -= 1
        finally:
            self._coming.pop(key, None)
            self._held -= counted
            self._freed.set()

    async def _room(self, key: object, size: int) -> None:
        """Wait until a body may go on: while as much memory is left as it has, so that small ones overtake large ones.

        The first ones also may if there is no complete body, whose end would make room.
        """
        self._waiting += 1
        try:
            while self._held + size > self._most and (self._complete or key not in islice(self._coming, self._at_once)):
                self._freed.clear()
                await self._freed.wait()
        finally:
            self._waiting -= 1

    async def _part(self, receive: Receive, waited: float) -> tuple[Message, float]:
        """The next message of a large body, and the seconds that its sender has needed since the last 64 KiB."""
        clock = asyncio.get_running_loop().time
        part = asyncio.ensure_future(receive())
        try:
            while True:
                begun = clock()
                await asyncio.wait({part}, timeout=_HURRY / 10)
                waited += clock() - begun
                if part.done():
                    return part.result(), waited
                if waited > (_HURRY if self._waiting else _PATIENCE):
                    message = "the body came too slowly; send it again, over a faster connection or with less in it"
                    raise errors.ApiError(408, message, code="request_timeout")
        finally:
            part.cancel()

    def turn(self, body: bytes) -> AbstractAsyncContextManager[None]:
        """The context in which a body may be parsed."""
        return self._parsed if len(body) > LARGE else nullcontext()


def require_json(headers: Headers) -> None:
    """Refuse a body of another type, or a compressed one. A browser asks before it sends JSON to another origin."""
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        message = f"a body with Content-Encoding: {shortened(coding, 100)} is not read; send it uncompressed"
        raise errors.ApiError(415, message, code="unsupported_encoding")
    kind, _, subtype = headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise errors.bad_request(_NOT_AN_OBJECT, None)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. An error of the protocol if there is none."""
    collects = len(body) > LARGE and gc.isenabled()
    if collects:
        gc.disable()  # collections among a million new values would take most of the time; nobody else runs meanwhile
    try:
        data = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        raise errors.bad_request(f"the body is not JSON: {error.msg} at character {error.pos}", None) from None
    except RecursionError:
        raise errors.bad_request("the body is nested too deeply", None) from None
    except ValueError as error:  # it is not UTF-8, or has an integer of thousands of digits
        raise errors.bad_request(f"the body is not JSON: {error}", None) from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(data, dict):
        raise errors.bad_request(_NOT_AN_OBJECT, None)
    return data
