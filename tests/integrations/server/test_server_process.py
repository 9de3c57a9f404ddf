"""The process of a server: it listens, drains on SIGTERM, and notices clients that go."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.lifecycle import ServerState
from tests.helpers.in_threads import start, wait_until
from tests.helpers.inside import sequences_running
from tests.helpers.served import CHAT, HELLO, PATIENCE, Gate, Speaker, gated, speaker

LONG = {"messages": HELLO, "max_tokens": 300, "stream": True}


@pytest.fixture(scope="module")
def endless() -> Speaker:
    engine = speaker(ends=False, prefix_cache_mb=0)
    engine.chat(HELLO, max_new_tokens=1)
    return engine


@pytest.fixture
def gate(endless: Speaker) -> Iterator[Gate]:
    with gated(endless) as gate:
        yield gate


def read(url: str, body: dict[str, Any], lines: list[str]) -> threading.Thread:
    """Read a response line by line in a thread; the last line is its status."""

    def run() -> None:
        with httpx.stream("POST", url + CHAT, json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                lines.append(line)
            lines.append(str(response.status_code))

    return start(run)


def data(lines: list[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.slow
def test_answers_that_run_end_and_no_others_begin(endless: Speaker, gate: Gate, listen: Callable[..., Any]) -> None:
    server = listen(create_app(endless))
    lines: list[str] = []
    reader = read(server.url, LONG, lines)
    gate.allow(20)
    wait_until(lambda: len(data(lines)) > 1)
    assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 200
    server.terminate()
    health = httpx.get(server.url + "/health", timeout=PATIENCE)
    assert (health.status_code, health.json()["error"]["code"]) == (503, "shutting_down")
    refused = httpx.post(server.url + CHAT, json=LONG, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["retry-after"]
    gate.open()
    reader.join(PATIENCE)
    assert data(lines)[-1] == "[DONE]"
    assert json.loads(data(lines)[-2])["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: server.ended)


def test_answers_that_do_not_end_in_time_end_with_an_error(
    endless: Speaker, gate: Gate, listen: Callable[..., Any]
) -> None:
    server = listen(create_app(endless, ServerSettings(shutdown_timeout=0.3)))
    streamed: list[str] = []
    whole: list[str] = []
    longer = {**LONG, "max_tokens": 3000}  # a pass can decide several tokens of both answers
    readers = [read(server.url, longer, streamed), read(server.url, {**longer, "stream": False}, whole)]
    gate.allow(60)
    wait_until(lambda: gate.reached == 61 and len(data(streamed)) > 1 and sequences_running(endless) == 2)
    server.terminate()
    wait_until(lambda: len(server._server._state.calls) and server._server.should_exit)
    gate.open()
    for reader in readers:
        reader.join(PATIENCE)
    error = json.loads(data(streamed)[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "shutting_down")
    assert whole[-1] == "503"
    assert json.loads(whole[0])["error"]["code"] == "shutting_down"
    wait_until(lambda: server.ended)


def test_a_second_signal_does_not_wait(endless: Speaker, gate: Gate, listen: Callable[..., Any]) -> None:
    server = listen(create_app(endless, ServerSettings(shutdown_timeout=10_000)))
    lines: list[str] = []
    reader = read(server.url, LONG, lines)
    gate.allow(20)
    wait_until(lambda: len(data(lines)) > 1)
    server.terminate()
    server.terminate()
    wait_until(lambda: server._server.should_exit)
    gate.open()
    reader.join(PATIENCE)
    assert json.loads(data(lines)[-1])["error"]["code"] == "shutting_down"
    wait_until(lambda: server.ended)


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_that_is_closed_ends_the_work(
    endless: Speaker, gate: Gate, listen: Callable[..., Any], stream: bool
) -> None:
    app = create_app(endless)
    state: ServerState = app.state.cocoa
    server = listen(app)
    gate.allow(20)
    body = {**LONG, "stream": stream}
    if stream:
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()  # dropping the iterator would close the connection
            next(line for line in lines if line.startswith("data: "))  # while the prompt is read there are comments
            wait_until(lambda: gate.reached == 21)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=body, timeout=1.0)
        assert gate.reached == 21
    [call] = state.calls._open
    wait_until(lambda: call.ended_by == "client")
    gate.allow(100)
    wait_until(lambda: sequences_running(endless) == 0)
    assert gate.reached == 21


def test_a_server_whose_model_cannot_be_loaded_ends(listen: Callable[..., Any]) -> None:
    def load() -> Speaker:
        assert go.wait(PATIENCE)
        raise OSError("no such model")

    go = threading.Event()
    app = create_app(load)
    server = listen(app)
    assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 503
    go.set()
    wait_until(lambda: server.ended)
    assert isinstance(app.state.cocoa.error, OSError)
