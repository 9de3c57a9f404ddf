"""Bytes that are not HTTP, and requests to change the protocol, on real connections."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.inside import assert_idle
from tests.helpers.served import CHAT, HELLO, Speaker, speaker

HOST = "Host: localhost\r\n"
JSON = "Content-Type: application/json\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
UPGRADE = (
    "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: YWFhYWFhYWFhYWFhYWFhYQ==\r\n"
)


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker()


@pytest.fixture
def ask(listen: Callable[..., Any], tiny: Speaker) -> Iterator[Callable[[str], tuple[int, dict[str, str], Any]]]:
    """Sends bytes, and reads the status, the headers and the JSON of the answer until the server hangs up."""
    address = listen(create_app(tiny)).url.removeprefix("http://").split(":")

    def sent(text: str) -> tuple[int, dict[str, str], Any]:
        with socket.create_connection((address[0], int(address[1])), timeout=60) as opened:
            opened.sendall(text.encode("latin-1"))
            answer = b"".join(iter(lambda: opened.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), json.loads(body)

    yield sent
    assert_idle(tiny)


@pytest.mark.parametrize(
    "text",
    [
        f"POST {CHAT} HTTP/1.1\r\n{HOST}{JSON}Content-Length: -5\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\n{HOST}{JSON}Content-Length: five\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\n{HOST}{JSON}{CHUNKED}\r\nxyz\r\n{{}}\r\n0\r\n\r\n",
        f"GET /health HTTP/1.1\r\n{HOST}no colon\r\n\r\n",
        "GET\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",  # TLS
    ],
)
def test_what_is_not_http_gets_the_error_of_the_protocol(ask: Callable[[str], Any], text: str) -> None:
    status, headers, body = ask(text)
    assert status == 400
    assert (headers["content-type"], headers["connection"]) == ("application/json", "close")
    error = body["error"]
    assert "HTTP" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": "malformed_request"}
    assert ask(f"GET /health HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n")[0] == 200


BODY = json.dumps({"messages": HELLO, "max_tokens": 1})
CHUNKS = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
BOTH = f"Content-Length: {len(BODY)}\r\n{CHUNKED}"


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (BOTH, CHUNKS),
        (f"{CHUNKED}Content-Length: 5\r\n", CHUNKS),
        (f"{CHUNKED}Content-Length: 5\r\n", "5\r\nhello\r\n" * 200_000 + "0\r\n\r\n"),
        ("Content-Length: 5\r\nContent-Length: 6\r\n", BODY),
        (f"Content-Length: +{len(BODY)}\r\n", BODY),
        (f"Content-Length: {10**30}\r\n", BODY),
        ("Content-Length: -5\r\n", "x" * 2_000_000),
        ("Transfer-Encoding: gzip\r\n", CHUNKS),
        ("Transfer-Encoding: chunked, gzip\r\n", CHUNKS),
        (f"{CHUNKED}{CHUNKED}", CHUNKS),
        (CHUNKED, "-5\r\nhello\r\n"),
        (CHUNKED, f"{len(BODY):x}\r\n{BODY}too long\r\n0\r\n\r\n"),
    ],
)
def test_a_body_of_unclear_length_is_answered_and_ends_the_connection(
    ask: Callable[[str], Any], framing: str, body: str
) -> None:
    status, headers, answer = ask(f"POST {CHAT} HTTP/1.1\r\n{HOST}{JSON}{framing}\r\n{body}")
    assert (status, headers["connection"]) == (400, "close")
    assert answer["error"]["code"] == "malformed_request"


SECRET = "sk-secret"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (f"/health?api_key={SECRET}", 200),
        (f"/health?x=1&access_token={SECRET}#{SECRET}", 200),
        (f"http://user:{SECRET}@localhost/health?key={SECRET}", 200),
        (f"http://{SECRET}@localhost/nowhere", 404),
        (f"/nowhere?{SECRET}", 404),
    ],
)
@pytest.mark.parametrize("log_prompts", [False, True])
def test_keys_in_a_url_reach_no_log(
    listen: Callable[..., Any],
    tiny: Speaker,
    caplog: pytest.LogCaptureFixture,
    target: str,
    status: int,
    log_prompts: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = listen(create_app(tiny, ServerSettings(log_prompts=log_prompts))).url
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as opened:
        opened.sendall(f"GET {target} HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: opened.recv(65536), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert "GET /" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.slow
def test_a_request_that_was_answered_before_it_was_malformed_gets_no_second_answer(
    listen: Callable[..., Any], tiny: Speaker
) -> None:
    address = listen(create_app(tiny, ServerSettings(max_body_bytes=10))).url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as opened:
        opened.sendall(f"POST {CHAT} HTTP/1.1\r\n{HOST}{JSON}{CHUNKED}\r\n14\r\n{'x' * 20}\r\n".encode())
        answer = opened.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")
        opened.sendall(b"no size\r\n")
        answer += b"".join(iter(lambda: opened.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(("path", "status", "code"), [(CHAT, 405, "method_not_allowed"), ("/ws", 404, "not_found")])
def test_web_sockets_are_refused_as_other_requests_are(
    ask: Callable[[str], Any], path: str, status: int, code: str
) -> None:
    got, _, body = ask(f"GET {path} HTTP/1.1\r\n{HOST}{UPGRADE}\r\n")
    assert (got, body["error"]["code"]) == (status, code)
