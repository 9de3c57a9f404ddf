"""The process of a server: it listens, drains on SIGTERM, notices clients that go or read slowly, and keeps nothing.

All that it writes has no text of a request, and no control characters, whoever writes it. Its threads share one
arena of glibc's allocator, unless the user has set it. Bytes that are not HTTP, and requests to change the protocol,
are refused. ``cocoa serve``: its options, its keys, and how it ends.
"""

import asyncio
import gc
import json
import logging
import os
import platform
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import typer
from typer.testing import CliRunner

from cocoa_engine import CocoaEngine, ConfigError, SpanStream
from cocoa_engine.cli.app import OneLineErrors
from cocoa_integrations._shared import engines
from cocoa_integrations.server import ServerSettings, command, create_app, process
from cocoa_integrations.server.process import DrainingServer, free_memory_released, keep_one_arena, listening, one_arena
from cocoa_integrations.server.work import Call, EventStream
from tests.helpers.cocoa import Cocoa
from tests.helpers.in_threads import happens, join, start, wait_until
from tests.helpers.inside import Gate, assert_idle, sequences_running
from tests.helpers.live_server import Reader
from tests.helpers.processes import python
from tests.helpers.reasoning_models import PLAIN, Speaker, speaker
from tests.helpers.served import ASKED, CHAT, COMPLETIONS, HELLO, PATIENCE, SCORE, client_of, joined, post
from tests.helpers.server_process import STUCK, quote, serve, server_process, serves, write_arenas

LONG = {"messages": HELLO, "max_tokens": 300, "stream": True}
ENDLESS = {**LONG, "max_tokens": 4000}
SHORT = {"messages": HELLO, "max_tokens": 5}
LARGE = {**ENDLESS, "logprobs": True, "top_logprobs": 20, "cocoa": {"candidates": True}}
"""Its chunks are large, so that few fill a socket."""


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
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_connection_that_is_closed_ends_the_work_within_one_pass(
    endless: Speaker, gate: Gate, listen: Callable[..., Any], path: str, stream: bool
) -> None:
    app = create_app(endless)
    url = listen(app).url
    gate.allow(20)
    async with asked(url, {**ASKED[path], "max_tokens": 300, "stream": stream}, path):
        await happens(lambda: gate.reached == 21)  # the pass that waits has begun
        [call] = app.state.cocoa.calls._open
    await happens(lambda: call.ended_by == "client")
    gate.allow(100)
    await happens(lambda: sequences_running(endless) == 0 and not app.state.cocoa.calls)
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
    (SCORE, {**BURN, "text": "a"}),
    (CHAT, {"messages": HELLO, "response_format": BURNING_ANSWER, "max_tokens": 200}),
]
"""Requests whose work takes minutes: a grammar, a template, the validation of an answer."""


@pytest.mark.slow
async def test_a_client_that_leaves_ends_work_outside_of_forward_passes(
    listen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocoa_engine.model.tokenizer.RENDERING_SECONDS", 10**4)
    app = create_app(speaker(template=BURNING_TEMPLATE))
    url = listen(app).url
    async with AsyncExitStack() as clients:
        for path, body in WORK:
            await clients.enter_async_context(asked(url, body, path))
        await happens(lambda: len(app.state.cocoa.calls) == engines.running() == len(WORK))
        await asyncio.sleep(1.0)  # the grammar of the answer is ready, and the answer is validated
    await happens(lambda: not app.state.cocoa.calls)
    await happens(lambda: not engines.running())
    assert (await client_of(app).get("/health")).status_code == 200


@pytest.mark.slow
def test_a_shutdown_ends_work_outside_of_forward_passes() -> None:
    """Work that no cancellation reaches, such as a forward pass that does not end, ends with the process."""
    endless = {"messages": [{"role": "user", "content": "long " * STUCK}]}
    with server_process(partial(serve, template=BURNING_TEMPLATE)) as (process, address):
        url = address()
        clients = []
        for path, body in (*WORK, (CHAT, endless)):
            if body is endless:
                time.sleep(2.0)  # the other work has begun
            clients.append(start(partial(httpx.post, url + path, json=body, timeout=PATIENCE)))
        time.sleep(0.5)
        process.terminate()
        process.join(PATIENCE)
        assert process.exitcode == 0
        join(clients)


@asynccontextmanager
async def asked(
    url: str, body: dict[str, Any], path: str = CHAT
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request whose response is read only as far as the test reads it: the client has no buffer of its own."""
    port = int(url.rpartition(":")[2])
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=opened, limit=1)
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
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
    server = listen(app)
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # is full sooner
    url, passes = server.url, []
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
            async with asked(url, LARGE), asked(url, LARGE):
                await happens(lambda: len(app.state.cocoa.calls) == 4)
                assert httpx.post(url + CHAT, json=SHORT, timeout=PATIENCE).status_code == 429  # the engine is idle
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
    text = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", b"\r\n" + got.partition(b"\r\n\r\n")[2]).decode()  # HTTP's chunks
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    assert joined(events) == expected
    # streams that are read to their end are not cancelled: the server tells of a disconnect after the last chunk, too
    lines = httpx.get(url + "/metrics", timeout=PATIENCE).text.splitlines()
    assert [line for line in lines if line.startswith("cocoa:cancelled_total{") and not line.endswith(" 0.0")] == []
    assert_idle(endless)


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
        for _ in range(5):  # a worker thread holds the last stream until it has ended its call
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
    with server_process(partial(serve, ends=False)) as (killed, address):
        url = address()
        with httpx.stream("POST", url + CHAT, json=ENDLESS, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(line for line in lines if line.startswith("data: "))  # while the prompt is read there are comments
            killed.kill()
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


SECRET = "my-secret"
FORGED = f"{SECRET}\nERROR: a forged line\x1b[31m\x9b31m\u2028"
QUESTION = json.dumps({"messages": [{"role": "user", "content": FORGED}]})
REQUESTS = (
    f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(QUESTION)}\r\n"
    f"X-Forwarded-For: {SECRET}\x9b31m\r\nUser-Agent: {SECRET}\r\n{SECRET}: {SECRET}\r\n\r\n{QUESTION}",
    f"{SECRET} /health?key={SECRET} HTTP/1.1\r\nHost: {SECRET}\r\n\r\n",
    f"GET /health HTTP/{SECRET}\r\n\r\n",
    f"{SECRET}\r\n\r\n",
)


@pytest.mark.slow
def test_nothing_that_a_server_writes_has_text_of_a_request(tmp_path: Path) -> None:
    """Text that may be written stays in its line."""
    output, written = tmp_path / "output", []
    with server_process(quote, output) as (process, address):
        for _ in range(2):
            port = int(address().rpartition(":")[2])
            written.append(output.read_text(encoding="utf-8"))
            for request in REQUESTS:
                with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as opened:
                    opened.sendall(request.encode("latin-1"))
                    assert opened.recv(9)
            process.terminate()
        process.join(PATIENCE)
    hidden = written[1]
    shown = output.read_text(encoding="utf-8").removeprefix(hidden)
    assert SECRET not in hidden
    assert hidden.count("RuntimeError (--log-prompts shows its message)") == 1
    assert "another.package has a message" in hidden
    assert "in raise_in_thread" in hidden  # where an error was raised is shown
    assert '"_OTHER /health HTTP/1.1" 400' in hidden
    assert "127.0.0.1" in hidden
    lines = shown.splitlines()
    assert any("another.package" not in line and "forged" in line for line in lines if SECRET in line)
    assert not any(line.startswith("ERROR: a forged") for line in lines)
    assert not {"\x1b", "\x9b", "\u2028"} & set(shown)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of this process leaves the allocator as it is."""
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_all_threads_share_one_arena_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    """Each other thread has one of its own otherwise, besides the main thread's. Imports make none."""
    output = tmp_path / "output"
    for keep, variables, count in ((False, {}, 7), (True, {}, 1), (True, {"MALLOC_TRIM_THRESHOLD_": "131072"}, 7)):
        with server_process(write_arenas, output, keep, variables) as (process, _):
            process.join(PATIENCE)
        assert output.read_text(encoding="utf-8").count("Arena ") == count


@pytest.mark.parametrize(
    ("name", "value", "is_set"),
    [
        ("MALLOC_ARENA_MAX", "0", True),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=8", True),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_shstk=off", False),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_set: bool) -> None:
    monkeypatch.setenv(name, value)
    assert one_arena() == ({} if is_set else {"MALLOC_ARENA_MAX": "1"})


def musl(name: None) -> Any:
    """It has no gnu_get_libc_version, and other numbers."""
    return SimpleNamespace(mallopt=lambda *numbers: pytest.fail("musl's mallopt must not be called"))


@pytest.mark.parametrize("library", [musl, Mock(side_effect=TypeError("bad argument type"))], ids=["musl", "windows"])
def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setattr("ctypes.CDLL", library)
    assert not keep_one_arena()


@pytest.mark.parametrize(("arenas", "releases"), [(None, True), ("1", True), ("8", False)])
async def test_free_memory_is_released_until_the_server_ends(
    monkeypatch: pytest.MonkeyPatch, arenas: str | None, releases: bool
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(process, "release_free_memory", lambda: threads.append(threading.current_thread()))
    monkeypatch.setattr(process, "RELEASE_INTERVAL", 0.001)
    if arenas is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", arenas)
    async with free_memory_released():
        if releases:
            await happens(lambda: len(threads) > 2)
        await asyncio.sleep(0.02)
    after = len(threads)
    await asyncio.sleep(0.02)
    assert len(threads) - after <= 1  # the one that had begun
    assert bool(threads) is releases
    assert threading.main_thread() not in threads  # a release takes milliseconds


HOST = "Host: localhost\r\n"
JSON = "Content-Type: application/json\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
UPGRADE = (
    "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: YWFhYWFhYWFhYWFhYWFhYQ==\r\n"
)


def answer_to(url: str, text: str) -> bytes:
    """What the server answers to bytes until it hangs up."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as opened:
        opened.sendall(text.encode("latin-1"))
        return b"".join(iter(lambda: opened.recv(65536), b""))


HELLO_BODY = json.dumps({"messages": HELLO, "max_tokens": 1})
CHUNKS = f"{len(HELLO_BODY):x}\r\n{HELLO_BODY}\r\n0\r\n\r\n"
UNCLEAR = [
    (f"Content-Length: {len(HELLO_BODY)}\r\n{CHUNKED}", CHUNKS),
    (f"{CHUNKED}Content-Length: 5\r\n", CHUNKS),
    (f"{CHUNKED}Content-Length: 5\r\n", "5\r\nhello\r\n" * 200_000 + "0\r\n\r\n"),
    ("Content-Length: 5\r\nContent-Length: 6\r\n", HELLO_BODY),
    (f"Content-Length: +{len(HELLO_BODY)}\r\n", HELLO_BODY),
    (f"Content-Length: {10**30}\r\n", HELLO_BODY),
    ("Content-Length: five\r\n", ""),
    ("Content-Length: -5\r\n", ""),
    ("Content-Length: -5\r\n", "x" * 2_000_000),
    ("Transfer-Encoding: gzip\r\n", CHUNKS),
    ("Transfer-Encoding: chunked, gzip\r\n", CHUNKS),
    (f"{CHUNKED}{CHUNKED}", CHUNKS),
    (CHUNKED, "-5\r\nhello\r\n"),
    (CHUNKED, "xyz\r\n{}\r\n0\r\n\r\n"),
    (CHUNKED, f"{len(HELLO_BODY):x}\r\n{HELLO_BODY}too long\r\n0\r\n\r\n"),
]
"""Headers that say how long a body is, and the body."""
NO_HTTP = [
    f"GET /health HTTP/1.1\r\n{HOST}no colon\r\n\r\n",
    "GET\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",  # TLS
    *(f"POST {CHAT} HTTP/1.1\r\n{HOST}{JSON}{framing}\r\n{body}" for framing, body in UNCLEAR),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NO_HTTP)))
def test_what_is_not_http_is_refused_and_ends_its_connection(
    listen: Callable[..., Any], tiny: Speaker, number: int
) -> None:
    url, answer = listen(create_app(tiny)).url, b"HTTP/1.1 400 "
    with suppress(ConnectionError):  # uvicorn closes the connection, of which it has not read all
        answer = answer_to(url, NO_HTTP[number])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer_to(url, f"GET /health HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert_idle(tiny)


KEY = "sk-secret"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (f"/health?api_key={KEY}", 200),
        (f"/health?x=1&access_token={KEY}#{KEY}", 200),
        (f"http://user:{KEY}@localhost/health?key={KEY}", 200),
        (f"http://{KEY}@localhost/nowhere", 404),
        (f"/nowhere?{KEY}", 404),
    ],
)
def test_keys_in_a_url_reach_no_log(
    listen: Callable[..., Any], tiny: Speaker, caplog: pytest.LogCaptureFixture, target: str, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    for log_prompts in (False, True):
        url = listen(create_app(tiny, ServerSettings(log_prompts=log_prompts))).url
        answer = answer_to(url, f"GET {target} HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n")
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert caplog.text.count("GET /") == 2
    assert KEY not in caplog.text


@pytest.mark.parametrize(("path", "status", "code"), [(CHAT, 405, "method_not_allowed"), ("/ws", 404, "not_found")])
def test_web_sockets_are_refused_as_other_requests_are(
    listen: Callable[..., Any], tiny: Speaker, path: str, status: int, code: str
) -> None:
    answer = answer_to(listen(create_app(tiny)).url, f"GET {path} HTTP/1.1\r\n{HOST}{UPGRADE}\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line, *headers = head.decode().split("\r\n")
    assert all(": " in header for header in headers)
    assert (int(status_line.split()[1]), json.loads(body)["error"]["code"]) == (status, code)
    assert_idle(tiny)


@pytest.fixture
def cocoa(monkeypatch: pytest.MonkeyPatch) -> Cocoa:
    """Runs ``cocoa`` with some arguments in this process."""
    monkeypatch.delenv("COCOA_API_KEYS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(process, "log_config", lambda shows_texts: None)  # logging is left as it is
    app = typer.Typer(cls=OneLineErrors)
    app.command()(command.serve)
    app.callback()(lambda: None)
    return lambda *args: CliRunner().invoke(app, ["serve", *map(str, args)], prog_name="cocoa")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Loading returns a tiny engine; what was asked for is in the dict."""
    asked: dict[str, Any] = {}

    def load(model_name: str | None = None, **options: Any) -> CocoaEngine:
        asked.update(options, model_name=model_name)
        return speaker(max_batch_size=options["runtime"].max_batch_size, max_queue=options["runtime"].max_queue)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", load)
    return asked


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Calls a function with the server's address in a thread, and then sends this process a signal."""
    servers: list[process.DrainingServer] = []

    class Noted(process.DrainingServer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, log_config=None)
            servers.append(self)

    monkeypatch.setattr(process, "DrainingServer", Noted)

    def begin(visit: Callable[[str], None], kind: signal.Signals = signal.SIGTERM) -> list[Any]:
        outcome: list[Any] = []

        def run() -> None:
            wait_until(lambda: servers and servers[0].started)
            try:
                visit(f"http://127.0.0.1:{servers[0].servers[0].sockets[0].getsockname()[1]}")
            finally:
                os.kill(os.getpid(), kind)

        start(run, outcome)
        return outcome

    return begin


def until_ready(url: str, **headers: str) -> httpx.Response:
    wait_until(lambda: serves(url))
    return httpx.post(url + CHAT, json={"messages": HELLO}, headers=headers, timeout=PATIENCE)


def test_a_server_from_its_start_to_sigterm(
    cocoa: Cocoa, loaded: dict[str, Any], meanwhile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(process, "keep_one_arena", lambda: seen.update(arena_before_loading=not loaded))

    def visit(url: str) -> None:
        seen["refused"] = until_ready(url).status_code
        seen["answer"] = until_ready(url, authorization="Bearer k2").json()

    outcome = meanwhile(visit)
    options = ["--port", 0, "--api-key", "k1", "--api-key", "k2", "--method", "greedy", "--max-new-tokens", 3]
    options += ["--served-model-name", "small", "--max-batch-size", 3, "--max-queue", 5, "--calibrator", "none"]
    result = cocoa("some/model", "--dtype", "float32", *options)
    assert outcome == [None], outcome
    assert result.exit_code == 0, result.output
    assert loaded["model_name"] == "some/model"
    assert loaded["dtype"] == "float32"
    assert loaded["calibrator"] is None
    assert (loaded["runtime"].max_batch_size, loaded["runtime"].max_queue) == (3, 5)
    assert seen["arena_before_loading"]
    assert seen["refused"] == 401
    assert seen["answer"]["model"] == "small"
    assert seen["answer"]["usage"]["completion_tokens"] == 3
    assert seen["answer"]["choices"][0]["message"]["cocoa_risk"]["method"] == "greedy"


def test_a_model_that_cannot_be_found_ends_the_command(cocoa: Cocoa, tmp_path: Path) -> None:
    result = cocoa(tmp_path / "nothing", "--port", 0)
    assert result.exit_code == 2
    assert "nothing" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "give a key"),
        (["--api-key", ""], "key 0 is empty"),
        (["--api-key-file", "missing"], "--api-key-file missing"),
        (["--alpha", "-1"], "alpha"),
        (["--max-queue", "-1"], "max-queue"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(
    cocoa: Cocoa, loaded: dict[str, Any], options: list[str], message: str
) -> None:
    result = cocoa(*options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not loaded


def test_a_port_that_is_taken_ends_the_command(cocoa: Cocoa, loaded: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cocoa("--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in result.stderr
    assert not loaded
    assert cocoa("--host", "203.0.113.7", "--api-key", "k", "--port", 0).exit_code == 2  # of no machine


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loaded_ends_the_command_at_once(
    cocoa: Cocoa, meanwhile: Any, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    done = threading.Event()
    begun = threading.Event()

    def load(*_: Any, **__: Any) -> CocoaEngine:
        begun.set()
        assert done.wait(PATIENCE)
        raise OSError("too late")

    def leave(code: int) -> None:
        raise SystemExit(code + 77)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", load)
    monkeypatch.setattr(os, "_exit", leave)
    outcome = meanwhile(lambda url: begun.wait(PATIENCE) and None, kind)
    try:
        result = cocoa("--port", 0)
    finally:
        done.set()
    assert outcome == [None]
    assert result.exit_code == 77
    assert "stopped before the model was loaded" in result.stderr


def test_keys_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nk3\n\n  k4  \n")
    monkeypatch.setenv("COCOA_API_KEYS", "k5, k6 k7")
    assert sorted(command.given_keys(["k1", "k2"], file)) == [f"k{number}" for number in range(1, 8)]
    monkeypatch.delenv("COCOA_API_KEYS")
    assert command.given_keys((), None) == []
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        command.given_keys((), file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="--api-key-file"):
        command.given_keys((), file)


def test_listing_the_command_imports_no_web_framework() -> None:
    code = (
        "import sys, cocoa_integrations.server.command\n"
        "assert not {'torch', 'fastapi', 'uvicorn', 'transformers'} & sys.modules.keys()\n"
        "sys.modules['fastapi'] = None\n"
        "from cocoa_engine.errors import MissingExtraError\n"
        "try:\n"
        "    from cocoa_integrations.server import create_app\n"
        "except MissingExtraError as error:\n"
        "    print(error)\n"
    )
    assert python(code) == "cocoa_integrations.server needs fastapi: pip install 'cocoa-integrations[serve]'\n"
