"""The process of a server: it listens, drains on SIGTERM, and notices clients that go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cocoa_integrations._shared import workers
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.lifecycle import ServerState
from tests.helpers.in_threads import start, wait_until
from tests.helpers.inside import sequences_running
from tests.helpers.paths import ROOT
from tests.helpers.reasoning_models import PLAIN
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


@pytest.mark.parametrize(("patience", "signals"), [(0.3, 1), (10_000, 2)])
def test_answers_that_do_not_end_in_time_end_with_an_error(
    endless: Speaker, gate: Gate, listen: Callable[..., Any], patience: float, signals: int
) -> None:
    """A second signal does not wait."""
    server = listen(create_app(endless, ServerSettings(shutdown_timeout=patience)))
    streamed: list[str] = []
    whole: list[str] = []
    longer = {**LONG, "max_tokens": 3000}  # a pass can decide several tokens of both answers
    readers = [read(server.url, longer, streamed), read(server.url, {**longer, "stream": False}, whole)]
    gate.allow(60)
    wait_until(lambda: gate.reached == 61 and len(data(streamed)) > 1 and sequences_running(endless) == 2)
    for _ in range(signals):
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


BURNING_TEMPLATE = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
BURNING_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 99999989}}}
# the grammar has one answer, on which the validation of what no grammar enforces does not end
BURNING_ANSWER = {
    "type": "json_schema",
    "json_schema": {"schema": {"enum": ["a" * 40 + "!"], "not": {"pattern": "^(a+)+$"}}},
}
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "grammar": (CHAT, {"messages": HELLO, "response_format": BURNING_SCHEMA}),
    "grammar of a stream": (CHAT, {"messages": HELLO, "response_format": BURNING_SCHEMA, "stream": True}),
    "template": (CHAT, {"messages": HELLO}),
    "template of a score": ("/v1/cocoa/score", {"messages": HELLO, "text": "a"}),
    "answer": (CHAT, {"messages": HELLO, "response_format": BURNING_ANSWER, "max_tokens": 200}),
}
"""Requests whose work takes minutes."""


@pytest.fixture(scope="module", params=WORK)
def work(request: pytest.FixtureRequest) -> tuple[Speaker, str, dict[str, Any]]:
    template = BURNING_TEMPLATE if request.param.startswith("template") else PLAIN
    return speaker(template=template), *WORK[request.param]


def test_a_client_that_leaves_ends_work_outside_of_forward_passes(
    work: tuple[Speaker, str, dict[str, Any]], listen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocoa_engine.model.tokenizer.RENDERING_SECONDS", 10**4)
    engine, path, body = work
    app = create_app(engine)
    server = listen(app)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json=body, timeout=2.0)
    wait_until(lambda: not app.state.cocoa.calls)
    wait_until(lambda: not workers.running())
    assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grammar", "template", "answer", "pass"])
def test_a_shutdown_ends_work_outside_of_forward_passes(name: str) -> None:
    """Work that no cancellation reaches, such as a forward pass that does not end, ends with the process."""
    path, body = WORK.get(name, (CHAT, {"messages": HELLO}))
    template = BURNING_TEMPLATE if name == "template" else PLAIN
    program = f"""
import time
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.process import DrainingServer, listening
from tests.helpers.served import speaker
settings = ServerSettings(port=0, shutdown_timeout=0)
engine = speaker(template={template!r})
if {name == "pass"}:
    engine.model.forward = lambda *args, **options: time.sleep(10**4)
server = DrainingServer(create_app(engine, settings), ends_process=True)
socket = listening(settings)
print(socket.getsockname()[1], flush=True)
server.run(sockets=[socket])
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
            wait_until(lambda: serves(url))
            client = start(lambda: httpx.post(url + path, json=body, timeout=PATIENCE))
            time.sleep(2.0)  # the work has begun
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            client.join(PATIENCE)
        finally:
            process.kill()


def serves(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=PATIENCE).status_code == 200
    except httpx.HTTPError:
        return False
