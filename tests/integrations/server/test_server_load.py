"""The server under load: clients that read slowly or never, a killed process, and nothing left after many requests."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cocoa_engine import SpanStream
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.process import DrainingServer, listening
from cocoa_integrations.server.work import Call, EventStream
from tests.helpers.in_threads import join, start
from tests.helpers.inside import assert_idle, sequences_running
from tests.helpers.served import CHAT, HELLO, PATIENCE, Speaker, happens, joined, post, speaker
from tests.helpers.server_process import server_process

SHORT = {"messages": HELLO, "max_tokens": 5}
ENDLESS = {"messages": HELLO, "max_tokens": 4000, "stream": True}
LARGE = {**ENDLESS, "logprobs": True, "top_logprobs": 20, "cocoa": {"candidates": True}}
"""Its chunks are large, so that few fill a socket."""


@pytest.fixture(scope="module")
def endless() -> Speaker:
    engine = speaker(ends=False, max_batch_size=2, max_queue=2, prefix_cache_mb=0)
    engine.chat(HELLO, max_new_tokens=1)
    return engine


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


async def read(url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        return await client.post(url + CHAT, json=SHORT)


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
            assert [(await read(url)).status_code for _ in range(3)] == [200] * 3
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
            assert (await read(url)).status_code == 200
            got += await asyncio.wait_for(reader.read(512), PATIENCE)
        while part := await asyncio.wait_for(reader.read(4096), PATIENCE):
            got += part
            await asyncio.sleep(0.001)
    assert b"data: [DONE]\n\n" in got
    assert joined(events_of(got)) == expected
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
def test_streams_that_are_read_to_their_end_are_not_cancelled(listen: Callable[..., Any], endless: Speaker) -> None:
    """The server tells the app of a disconnect after the last chunk, too."""
    url = listen(create_app(endless)).url
    for _ in range(5):
        assert httpx.post(url + CHAT, json={**SHORT, "stream": True}, timeout=PATIENCE).text.endswith("[DONE]\n\n")
    lines = httpx.get(url + "/metrics", timeout=PATIENCE).text.splitlines()
    counted = [line for line in lines if line.startswith("cocoa:cancelled_total{")]
    assert [line for line in counted if not line.endswith(" 0.0")] == []


@pytest.mark.slow
def test_a_killed_server_is_an_error_for_its_clients_and_serves_again_at_once(
    endless: Speaker,
) -> None:
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
