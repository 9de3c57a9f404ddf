"""A server in a thread of this process, for models that ask over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

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
