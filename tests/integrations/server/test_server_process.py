"""The process of a server: it listens, drains on SIGTERM, notices clients that go or read slowly, and keeps nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cocoa_engine import SpanStream
from cocoa_integrations._shared import workers
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.lifecycle import ServerState
from cocoa_integrations.server.process import DrainingServer, listening
from cocoa_integrations.server.work import Call, EventStream
from tests.helpers.in_threads import join, start, wait_until
from tests.helpers.inside import assert_idle, sequences_running
from tests.helpers.live_server import Reader
from tests.helpers.reasoning_models import PLAIN
from tests.helpers.served import CHAT, HELLO, PATIENCE, Gate, Speaker, gated, happens, joined, post, speaker
from tests.helpers.server_process import server_process, serves

LONG = {"messages": HELLO, "max_tokens": 300, "stream": True}
ENDLESS = {**LONG, "max_tokens": 4000}
SHORT = {"messages": HELLO, "max_tokens": 5}
LARGE = {**ENDLESS, "logprobs": True, "top_logprobs": 20, "cocoa": {"candidates": True}}
"""Its chunks are large, so that few fill a socket."""


@pytest.fixture(scope="module")
def endless() -> Speaker:
    engine = speaker(ends=False, max_batch_size=2, max_queue=2, prefix_cache_mb=0)
    engine.chat(HELLO, max_new_tokens=1)
    return engine


@pytest.fixture
def gate(endless: Speaker) -> Iterator[Gate]:
    with gated(endless) as gate:
        yield gate


@pytest.mark.slow
def test_answers_that_run_end_and_no_others_begin(endless: Speaker, gate: Gate, listen: Callable[..., Any]) -> None:
    server = listen(create_app(endless))
    reader = Reader(server.url, LONG)
    gate.allow(20)
    wait_until(lambda: len(reader.events) > 1)
    assert serves(server.url)
    server.terminate()
    for refused in (
        httpx.get(server.url + "/health", timeout=PATIENCE),
        httpx.post(server.url + CHAT, json=LONG, timeout=PATIENCE),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"]
    gate.open()
    reader.finish()
    assert reader.events[-1] == "[DONE]"
    assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: server.ended)


@pytest.mark.parametrize(("patience", "signals"), [(0.3, 1), (10_000, 2)])
def test_answers_that_do_not_end_in_time_end_with_an_error(
    endless: Speaker, gate: Gate, listen: Callable[..., Any], patience: float, signals: int
) -> None:
    """A second signal does not wait."""
    server = listen(create_app(endless, ServerSettings(shutdown_timeout=patience)))
    longer = {**LONG, "max_tokens": 3000}  # a pass can decide several tokens of both answers
    answers: list[httpx.Response] = []
    streamed = Reader(server.url, longer)
    whole = start(lambda: httpx.post(server.url + CHAT, json={**longer, "stream": False}, timeout=PATIENCE), answers)
    gate.allow(60)
    wait_until(lambda: gate.reached == 61 and len(streamed.events) > 1 and sequences_running(endless) == 2)
    for _ in range(signals):
        server.terminate()
    wait_until(lambda: len(server.server._state.calls) and server.server.should_exit)
    gate.open()
    streamed.finish()
    join([whole])
    error = json.loads(streamed.events[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "shutting_down")
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
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


@asynccontextmanager
async def asked(url: str, body: dict[str, Any]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request whose response is read only as far as the test reads it: the client has no buffer of its own."""
    port = int(url.rpartition(":")[2])
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=opened, limit=1)
    text = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def answered(url: str, **more: Any) -> str:
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        response = await client.post(url + CHAT, json={**SHORT, **more})
    assert response.status_code == 200
    return response.text


@pytest.mark.slow
async def test_a_client_that_never_reads_stops_its_own_decoding_only(
    endless: Speaker, listen: Callable[..., Any]
) -> None:
    """Its stream decodes no further than its socket takes, holds no batch slot, and ends with the connection."""
    app = create_app(endless)
    url = listen(app).url
    passes: list[Any] = []
    endless.session.scheduler.observers.append(passes.append)
    try:
        async with asked(url, LARGE), asked(url, LARGE):
            counts: list[int] = []

            def stands_still() -> bool:
                counts.append(len(passes))
                return len(counts) > 100 and counts[-1] == counts[-100] > 0

            await happens(stands_still)
            assert sequences_running(endless) == 0
            assert len(app.state.cocoa.calls) == 2  # they are still counted, so that such clients are bounded
            for _ in range(3):
                await answered(url)
    finally:
        endless.session.scheduler.observers.remove(passes.append)
    await happens(lambda: len(app.state.cocoa.calls) == 0)
    assert_idle(endless)


@pytest.mark.slow
async def test_a_slow_reader_gets_everything_and_holds_nobody_up(endless: Speaker, listen: Callable[..., Any]) -> None:
    url = listen(create_app(endless)).url
    body = {**ENDLESS, "max_tokens": 150}
    expected = (await post(create_app(endless), {**body, "stream": False})).json()["choices"][0]["message"]["content"]
    async with asked(url, body) as (reader, _):
        got = await asyncio.wait_for(reader.read(512), PATIENCE)
        for _ in range(3):  # others are served while it pauses
            assert (await answered(url, stream=True)).endswith("[DONE]\n\n")
            got += await asyncio.wait_for(reader.read(512), PATIENCE)
        while part := await asyncio.wait_for(reader.read(4096), PATIENCE):
            got += part
            await asyncio.sleep(0.001)
    assert b"data: [DONE]\n\n" in got
    assert joined(events_of(got)) == expected
    # streams that are read to their end are not cancelled: the server tells of a disconnect after the last chunk, too
    lines = httpx.get(url + "/metrics", timeout=PATIENCE).text.splitlines()
    assert [line for line in lines if line.startswith("cocoa:cancelled_total{") and not line.endswith(" 0.0")] == []
    assert_idle(endless)


def events_of(response: bytes) -> list[dict[str, Any]]:
    """The chunks in a response in HTTP's chunked encoding."""
    _, _, rest = response.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.slow
async def test_many_requests_leave_nothing_behind(endless: Speaker) -> None:
    app = create_app(endless)

    def left() -> Counter[str]:
        gc.collect()
        kinds = (Call, EventStream, SpanStream, asyncio.Task)
        return Counter(type(value).__name__ for value in gc.get_objects() if type(value) in kinds)

    async def ask_some(number: int) -> Counter[str]:
        for at in range(number):
            assert (await post(app, {**SHORT, "stream": bool(at % 2), "max_tokens": 2})).status_code == 200
        counts = left()
        for _ in range(10):  # a worker thread holds the last stream until it has ended its call
            await asyncio.sleep(0.05)
            counts &= left()
        return counts

    before = await ask_some(4)
    assert await ask_some(12) <= before
    assert len(app.state.cocoa.calls) == 0
    assert not endless.session.scheduler.waiting
    assert_idle(endless)


@pytest.mark.slow
def test_a_killed_server_is_an_error_for_its_clients_and_serves_again_at_once(endless: Speaker) -> None:
    with server_process("speaker(ends=False)") as (killed, url):
        with httpx.stream("POST", url + CHAT, json=ENDLESS, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(line for line in lines if line.startswith("data: "))  # while the prompt is read there are comments
            killed.send_signal(signal.SIGKILL)
            got: list[str] = []
            with pytest.raises(httpx.RemoteProtocolError):
                got.extend(lines)
            assert "data: [DONE]" not in got
        with pytest.raises(httpx.ConnectError):
            httpx.post(url + CHAT, json=SHORT, timeout=PATIENCE)
    settings = ServerSettings(port=int(url.rpartition(":")[2]))
    server = DrainingServer(create_app(endless, settings), log_config=None)
    opened = listening(settings)  # at once, though connections of the killed one may linger
    thread = start(lambda: asyncio.run(server.serve(sockets=[opened])))
    assert httpx.post(url + CHAT, json=SHORT, timeout=PATIENCE).status_code == 200
    server.should_exit = True
    join([thread])
