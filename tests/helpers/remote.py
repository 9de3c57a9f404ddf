"""A server in a thread of this process, for models that ask over HTTP."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from cocoa_engine import CocoaEngine
from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.live_server import served


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
