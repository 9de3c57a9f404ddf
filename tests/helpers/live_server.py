"""Apps on real sockets, in threads of this process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.helpers.in_threads import join, start, wait_until

# uvicorn's own configuration of logging closes all handlers. That of absl, which rouge_score imports, then closes the
# stream that it was made with: the file in which pytest captures output.
OPTIONS: dict[str, Any] = {"port": 0, "log_config": None}


class Listening:
    """A server that runs in a thread.

    Attributes:
        url: its address.
    """

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
