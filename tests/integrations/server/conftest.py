"""Servers that listen on a free port of this machine."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from cocoa_integrations.server.process import DrainingServer
from tests.helpers.in_threads import wait_until
from tests.helpers.served import PATIENCE


class Listening:
    """A server that listens, run in a thread.

    Attributes:
        url: its address.
    """

    def __init__(self, app: FastAPI) -> None:
        self._server = DrainingServer(app, port=0, log_config=None)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def terminate(self) -> None:
        """As SIGTERM does."""
        self._server.handle_exit(signal.SIGTERM, None)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self.terminate()
        self.terminate()  # at once
        self._thread.join(PATIENCE)
        assert self.ended


@pytest.fixture
def listen() -> Iterator[Callable[[FastAPI], Listening]]:
    """Starts servers, which end with the test."""
    servers: list[Listening] = []

    def start(app: FastAPI, **_: Any) -> Listening:
        servers.append(Listening(app))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
