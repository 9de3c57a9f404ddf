"""Apps and servers of an engine on real sockets, and clients of them, in threads of this process."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.responses import Response

from cocoa_engine import CocoaEngine
from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.in_threads import PATIENCE, join, start, wait_until
from tests.helpers.served import CHAT

# uvicorn's own configuration of logging closes all handlers. That of absl, which rouge_score imports, then closes the
# stream that it was made with: the file in which pytest captures output.
OPTIONS: dict[str, Any] = {"port": 0, "log_config": None}


class Listening:
    """A server that runs in a thread."""

    def __init__(self, server: uvicorn.Server) -> None:
        self.server = server
        self._thread = start(lambda: asyncio.run(server.serve()))
        wait_until(lambda: server.started or self.ended)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def terminate(self) -> None:
        """As SIGTERM does."""
        self.server.handle_exit(signal.SIGTERM, None)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self.terminate()
        self.terminate()  # at once
        join([self._thread])


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serves an app on a free port of this machine, and yields its address."""
    server = Listening(uvicorn.Server(uvicorn.Config(app, **OPTIONS, timeout_graceful_shutdown=1)))
    try:
        yield server.url
    finally:
        server.stop()


class Reader:
    """Reads a streamed answer in a thread; the error is what the client's library raised."""

    def __init__(self, url: str, body: dict[str, Any], **headers: str) -> None:
        self.events: list[str] = []
        self.status = 0
        self.ended = False
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = start(lambda: self._read(url, body, headers))

    def _read(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            with httpx.stream("POST", url + CHAT, json=body, headers=headers, timeout=PATIENCE) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                    if self._stop.is_set():
                        return
                self.ended = True
        except Exception as error:
            self.error = error

    def leave(self) -> None:
        """Close the connection."""
        self._stop.set()
        self.finish()

    def finish(self) -> None:
        """Wait for the end of the response."""
        join([self._thread])


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an app on a free port of this machine; the address of its API."""
    with served(app) as url:
        yield f"{url}/v1"


@contextmanager
def serving(engine: CocoaEngine, **settings: Any) -> Iterator[str]:
    """Serve an engine; the address of its API."""
    with listening(create_app(engine, ServerSettings(**settings))) as url:
        yield url


class Recording:
    """An app that keeps the bodies and headers of the requests to another one.

    ``refusals`` are the status and the headers with which the next requests are refused.
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
