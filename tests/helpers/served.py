"""Requests to the server's app in this process, whole or as they come, and what is in the responses."""

import asyncio
import json
import threading
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cocoa_engine import CocoaEngine
from cocoa_integrations.server import ServerSettings, create_app

PATIENCE = 30.0
"""Seconds after which something that has not happened is taken to be stuck."""

CHAT, COMPLETIONS, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/cocoa/score"
HELLO = [{"role": "user", "content": "Say something."}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "The answer is é", "max_tokens": 24},
    SCORE: {},
}
"""What a request to a route has, unless a test says otherwise."""


def client_of(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    """A client of an app in this process. It reads streams only when they are complete."""
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers, timeout=PATIENCE)


async def post(app: FastAPI, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
    """The response to one request with JSON."""
    async with client_of(app, **{"content-type": "application/json", **headers}) as client:
        return await client.post(path, content=json.dumps(body))


async def chat(
    engine: CocoaEngine, settings: ServerSettings | None = None, path: str = CHAT, *, status: int = 200, **body: Any
) -> dict[str, Any]:
    """The answer to one request, or its error, if it must have another status."""
    response = await post(create_app(engine, settings), {**ASKED[path], **body}, path)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json() if status == 200 else error_of(response)
    return answer


refusal = partial(chat, status=400)


async def chunks(
    engine: CocoaEngine, settings: ServerSettings | None = None, path: str = CHAT, **body: Any
) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, which must end with ``[DONE]``."""
    response = await post(create_app(engine, settings), {**ASKED[path], "stream": True, **body}, path)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in a response, which must have OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"], body
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert response.headers["content-type"].startswith("application/json")
    return error


def text_of(choice: dict[str, Any], key: str = "content") -> str:
    """The text of an answer, or of a part of one."""
    return choice.get("text") or choice.get("message", choice.get("delta", {})).get(key) or ""


def joined(events: list[dict[str, Any]], index: int = 0, key: str = "content") -> str:
    """The text of one answer of a stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(text_of(choice, key) for choice in choices)


class Exchange:
    """One request to an app, whose response is read as it comes, and whose client can go.

    If the client does not read, the first part of the body that is sent blocks the app.
    """

    def __init__(self, app: FastAPI, body: Any, path: str = CHAT, *, reads: bool = True) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self._sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._reads = reads
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def events(self) -> list[str]:
        """The complete events so far."""
        return self.body.decode().split("\n\n")[:-1]

    def leave(self) -> None:
        """The client closes the connection."""
        self._gone.set_result(None)

    async def ended(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE)

    async def _receive(self) -> dict[str, Any]:
        if self._sent:
            return self._sent.pop()
        await asyncio.wait([self._gone], timeout=PATIENCE)
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            if not self._reads:
                await asyncio.wait([self._gone], timeout=PATIENCE)


def threads_of_json(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which JSON is parsed from now on, a number for each time."""
    noted: list[int] = []
    loads = json.loads

    def noting(text: Any, **options: Any) -> Any:
        noted.append(threading.get_ident())
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", noting)
    return noted
