"""Servers that listen on a free port of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI

from cocoa_integrations.server.process import DrainingServer
from tests.helpers.live_server import OPTIONS, Listening


@pytest.fixture
def listen() -> Iterator[Callable[[FastAPI], Listening]]:
    """Starts servers, which end with the test."""
    servers: list[Listening] = []

    def start(app: FastAPI) -> Listening:
        servers.append(Listening(DrainingServer(app, **OPTIONS)))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
