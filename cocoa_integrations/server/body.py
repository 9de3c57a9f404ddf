"""The body of a request: read with bounded memory, and parsed."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from itertools import islice
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from cocoa_integrations.server.errors import ApiError, bad_request

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
    Parsing holds the lock of the interpreter, and its result can take 40 times the memory of the body.

    Args:
        max_bytes: the maximum size of a body.
        at_once: the number of bodies of this size that fit the memory, and of those that may go beyond it.
    """

    def __init__(self, max_bytes: int, at_once: int = 8) -> None:
        self._at_once, self._most, self._held = at_once, at_once * max_bytes, 0
        self._coming: dict[object, None] = {}  # the large bodies of which more comes, in their order
        self._complete = self._waiting = 0
        self._freed, self._parsed = asyncio.Event(), asyncio.Semaphore(1)

    @asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes]:
        """A whole body within the context.

        Raises:
            ApiError: the client has gone, or sends too slowly.
        """
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
                    raise ApiError(499, "the client closed the connection", code="client_closed_request")
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
                    raise ApiError(408, message, code="request_timeout")
        finally:
            part.cancel()

    def turn(self, body: bytes) -> AbstractAsyncContextManager[None]:
        """The context in which a body may be parsed."""
        return self._parsed if len(body) > LARGE else nullcontext()


def require_json(headers: Headers) -> None:
    """Refuse a body of another type. A browser asks before it sends JSON to another origin.

    Raises:
        ApiError: the headers do not declare JSON.
    """
    kind, _, subtype = headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise bad_request(_NOT_AN_OBJECT, None)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        ApiError: there is none.
    """
    collects = len(body) > LARGE and gc.isenabled()
    if collects:
        gc.disable()  # collections among a million new values would take most of the time; nobody else runs meanwhile
    try:
        data = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error.msg} at character {error.pos}", None) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", None) from None
    except ValueError as error:  # it is not UTF-8, or has an integer of thousands of digits
        raise bad_request(f"the body is not JSON: {error}", None) from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(data, dict):
        raise bad_request(_NOT_AN_OBJECT, None)
    return data
