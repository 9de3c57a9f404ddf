"""A replica: one engine, behind the app of ``cocoa serve``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.types import Message

from cocoa_engine import CocoaEngine
from cocoa_integrations.ray.relay import Forwarded
from cocoa_integrations.server.app import create_app
from cocoa_integrations.server.settings import ServerSettings

if TYPE_CHECKING:
    from prometheus_client import Metric


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
        metrics = self._app.state.cocoa.metrics
        metrics.update()
        return list(metrics.registry.collect())
