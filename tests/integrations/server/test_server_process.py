"""The process of a server: it listens, drains on SIGTERM, and notices clients that go."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cocoa_integrations._shared import workers
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.lifecycle import ServerState
from tests.helpers.in_threads import join, start, wait_until
from tests.helpers.inside import sequences_running
from tests.helpers.reasoning_models import PLAIN
from tests.helpers.served import CHAT, HELLO, PATIENCE, Gate, Speaker, gated, speaker
from tests.helpers.server_process import server_process, serves

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


BURNING_TEMPLATE = (
    "{% if burn %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}" + PLAIN
)
BURNING_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 99999989}}}
# the grammar has one answer, on which the validation of what no grammar enforces does not end
BURNING_ANSWER = {
    "type": "json_schema",
    "json_schema": {"schema": {"enum": ["a" * 40 + "!"], "not": {"pattern": "^(a+)+$"}}},
}
BURN = {"messages": HELLO, "chat_template_kwargs": {"burn": True}}
WORK: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "response_format": BURNING_SCHEMA}),
    (CHAT, {"messages": HELLO, "response_format": BURNING_SCHEMA, "stream": True}),
    (CHAT, BURN),
    ("/v1/cocoa/score", {**BURN, "text": "a"}),
    (CHAT, {"messages": HELLO, "response_format": BURNING_ANSWER, "max_tokens": 200}),
]
"""Requests whose work takes minutes: a grammar, a template, the validation of an answer."""


def test_a_client_that_leaves_ends_work_outside_of_forward_passes(
    listen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocoa_engine.model.tokenizer.RENDERING_SECONDS", 10**4)
    app = create_app(speaker(template=BURNING_TEMPLATE))
    url = listen(app).url
    outcomes: list[Any] = []
    join([start(lambda each=each: httpx.post(url + each[0], json=each[1], timeout=4.0), outcomes) for each in WORK])
    assert [type(outcome) for outcome in outcomes] == [httpx.ReadTimeout] * len(WORK)
    wait_until(lambda: not app.state.cocoa.calls)
    wait_until(lambda: not workers.running())
    assert serves(url)


@pytest.mark.slow
@pytest.mark.parametrize("passes_end", [True, False])
def test_a_shutdown_ends_work_outside_of_forward_passes(passes_end: bool) -> None:
    """Work that no cancellation reaches, such as a forward pass that does not end, ends with the process."""
    endless = "engine.model.forward = lambda *args, **options: time.sleep(10**4)"
    more = "" if passes_end else endless
    with server_process(f"speaker(template={BURNING_TEMPLATE!r})", more) as (process, url):
        asked = WORK if passes_end else [(CHAT, {"messages": HELLO})]
        clients = [start(lambda each=each: httpx.post(url + each[0], json=each[1], timeout=PATIENCE)) for each in asked]
        time.sleep(2.0)  # the work has begun
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        join(clients)
