"""A server in a thread of this process, for models that ask over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.responses import Response

from cocoa_engine import CocoaEngine
from cocoa_integrations.server import ServerSettings, create_app

PATIENCE = 60.0
"""Seconds after which a server that has not started or ended is taken to be stuck."""


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an app on a free port of this machine; the address of its API."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
    started = threading.Event()
    starts = server.startup

    async def startup(sockets: Any = None) -> None:
        await starts(sockets)
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def serving(engine: CocoaEngine, **settings: Any) -> Iterator[str]:
    """Serve an engine; the address of its API."""
    with listening(create_app(engine, ServerSettings(**settings))) as url:
        yield url


class Recording:
    """An app that keeps the bodies and headers of the requests to another one, and can refuse requests itself.

    Attributes:
        bodies: the JSON of each request.
        headers: its headers.
        refusals: the status and the headers with which the next requests are refused.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.refusals: list[tuple[int, dict[str, str]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, messages = b"", []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            body += messages[-1].get("body", b"")
        self.bodies.append(json.loads(body) if body else None)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if self.refusals:
            status, headers = self.refusals.pop(0)
            error = {"message": "try later", "type": "rate_limit_error", "param": None, "code": "engine_busy"}
            response = Response(json.dumps({"error": error}), status, headers, media_type="application/json")
            await response(scope, receive, send)
            return

        async def replayed() -> Any:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replayed, send)
