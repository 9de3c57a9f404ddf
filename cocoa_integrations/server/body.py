"""The body of a request: read with bounded memory, and parsed."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from cocoa_integrations.server.errors import ApiError, bad_request

LARGE = 2**16
"""Bytes above which a body is large. A smaller one is parsed in a few milliseconds."""

_SLOWEST = 2**16
"""Bytes in a second. A large body that comes more slowly is refused, since others wait for its place."""

_NOT_AN_OBJECT = (
    "the body is missing or is not JSON: send a JSON object, with the header Content-Type: application/json"
)


class Bodies:
    """Reads bodies: of large ones a few at once, of which one at a time is parsed.

    Parsing holds the lock of the interpreter, and its result can take 40 times the memory of the body.

    Args:
        max_bytes: the maximum size of a body.
        at_once: the number of large bodies that are read at once.
    """

    def __init__(self, max_bytes: int, at_once: int = 8) -> None:
        self._patience = max(10.0, max_bytes / _SLOWEST)
        self._read, self._parsed = asyncio.Semaphore(at_once), asyncio.Semaphore(1)

    @asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes]:
        """A whole body within the context.

        Raises:
            ApiError: the client has gone, or sends too slowly.
        """
        async with AsyncExitStack() as place:
            parts: list[bytes] = []
            size, more, patience = 0, True, None
            while more:
                begun = asyncio.get_running_loop().time()
                try:
                    message = await asyncio.wait_for(receive(), patience)
                except asyncio.TimeoutError:
                    slow = f"the body came more slowly than {_SLOWEST} bytes in a second"
                    raise ApiError(408, slow, code="request_timeout") from None
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "the client closed the connection", code="client_closed_request")
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if patience is not None:
                    patience -= asyncio.get_running_loop().time() - begun
                elif size > LARGE:
                    await place.enter_async_context(self._read)
                    patience = self._patience
            yield b"".join(parts)

    @asynccontextmanager
    async def turn(self, body: bytes) -> AsyncIterator[None]:
        """The context in which a body may be parsed."""
        async with AsyncExitStack() as place:
            if len(body) > LARGE:
                await place.enter_async_context(self._parsed)
            yield


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
