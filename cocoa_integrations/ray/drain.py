"""The requests of a gateway that is told to stop: no further ones are taken, and those that run may end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from cocoa_integrations.server.errors import shutting_down


class Drain:
    """The requests that a gateway works on. All methods are called in the event loop of the gateway.

    Args:
        retry_after: seconds after which a refused client should try again.
    """

    def __init__(self, retry_after: int = 1) -> None:
        self._retry_after = max(1, retry_after)
        self._running: set[asyncio.Future[None]] = set()
        self._begun = False

    def begin(self) -> None:
        """Refuse further requests. Those that run go on."""
        self._begun = True

    def end(self) -> None:
        """Refuse further requests, and end those that run."""
        self._begun = True
        for work in self._running:
            work.cancel()

    def require_open(self) -> None:
        """Refuse a request while the gateway stops.

        Raises:
            ApiError: the gateway stops.
        """
        if self._begun:
            raise shutting_down(self._retry_after)

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of a request. If the caller is cancelled, so is the work.

        Raises:
            ApiError: the gateway ended it.
        """
        if self._begun:  # it was being received when the gateway was told to stop
            work.close()
            self.require_open()
        task = asyncio.ensure_future(work)
        self._running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._running.discard(task)
            if not task.done():  # the client has gone
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if task.cancelled() and self._begun:
            raise shutting_down(self._retry_after)
        task.result()

    def __len__(self) -> int:
        return len(self._running)
