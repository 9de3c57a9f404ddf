"""Tiny engines, and servers that listen on a free port of this machine."""

from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI

from cocoa_integrations.server.process import DrainingServer
from tests.helpers import tool_templates
from tests.helpers.inside import Gate, assert_idle, gated
from tests.helpers.live_server import OPTIONS, Listening
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import HELLO


@pytest.fixture(scope="session")
def tiny() -> Iterator[Speaker]:
    engine = speaker()
    yield engine
    assert_idle(engine)


@pytest.fixture(scope="session")
def hermes() -> Speaker:
    return speaker(template=tool_templates.HERMES)


@pytest.fixture(scope="session")
def endless() -> Speaker:
    """Answers until ``max_tokens``; two at a time, and two wait."""
    engine = speaker(ends=False, max_batch_size=2, max_queue=2, prefix_cache_mb=0)
    engine.chat(HELLO, max_new_tokens=1)  # the trials of the backend are over
    return engine


@pytest.fixture
def gate(endless: Speaker) -> Iterator[Gate]:
    with gated(endless) as gate:
        yield gate
    assert_idle(endless)


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
