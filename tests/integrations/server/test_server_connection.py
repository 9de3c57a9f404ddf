"""Bytes that are not HTTP, and requests to change the protocol, on real connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.inside import assert_idle
from tests.helpers.served import CHAT, Speaker, speaker

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
