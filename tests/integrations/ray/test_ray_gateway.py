"""The gateway without Ray: which replica a request goes to, what becomes of it when one ends, keys and metrics."""

import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from cocoa_engine.errors import EngineBusyError
from cocoa_integrations.ray.gateway import Board, Drain, Forwarded, Replica, ReplicaLostError, gateway, session_of
from cocoa_integrations.server import ServerSettings
from tests.helpers.in_threads import happens
from tests.helpers.inside import gated, sequences_running
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import CHAT, HELLO, Exchange, error_of, threads_of_json

SAYS = {"messages": HELLO, "max_tokens": 40}


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker("Yes, it is.")


class Handle:
    """Hands requests to one replica in this process, and notes their sessions.

    It loses the replica after a number of messages, one number for each attempt.
    """

    def __init__(self, replica: Replica, *lost_after: int) -> None:
        self.sessions: list[str | None] = []
        self._replica, self._lost_after = replica, list(lost_after)

    async def __call__(self, request: Forwarded, session: str | None) -> AsyncGenerator[Message, None]:
        self.sessions.append(session)
        left = self._lost_after.pop(0) if self._lost_after else -1
        async for messages in self._replica.answer(request):
            for message in messages:
                if left == 0:
                    raise ReplicaLostError("a replica ended")
                left -= 1
                yield message


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cocoa_integrations.ray.gateway.PAUSE", 0.0)


async def _ready() -> int:
    return 2


def app_of(
    ask: Any,
    *,
    board: Board | None = None,
    drain: Drain | None = None,
    ready: Any = _ready,
    retries: int = 2,
    **settings: Any,
) -> Any:
    drain = Drain(settings.get("retry_after", 1)) if drain is None else drain
    return gateway(ask, ready, ServerSettings(**settings), board=board or Board(60), drain=drain, retries=retries)


async def ask(app: Any, body: Any = SAYS, path: str = CHAT, *, client: str = "127.0.0.1", **headers: str) -> Any:
    transport = httpx.ASGITransport(app=app, client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers, timeout=30) as one:
        sent = {"json": body} if isinstance(body, dict) else {"content": body}
        return await (one.get(path) if body is None else one.post(path, **sent))


def text_of(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def events_of(response: httpx.Response) -> list[str]:
    return [event.removeprefix("data: ") for event in response.text.split("\n\n") if event.startswith("data: ")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_begins_anew_as_long_as_the_client_has_seen_nothing(tiny: Speaker, stream: bool) -> None:
    handle = Handle(Replica(tiny, ServerSettings()), 0, 1)
    response = await ask(app_of(handle), {**SAYS, "stream": stream})
    assert response.status_code == 200
    if stream:
        *_, finish, done = events_of(response)
        assert (json.loads(finish)["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    else:
        assert text_of(response) == "Yes, it is."
    assert len(handle.sessions) == 3
    assert len(set(handle.sessions)) == 1


async def test_a_stream_that_has_begun_ends_and_a_call_that_ends_every_replica_is_given_up(tiny: Speaker) -> None:
    handle = Handle(Replica(tiny, ServerSettings()), 3)
    response = await ask(app_of(handle), {**SAYS, "stream": True})
    assert response.status_code == 200
    *chunks, last = events_of(response)
    assert all("choices" in json.loads(chunk) for chunk in chunks)
    error = json.loads(last)["error"]
    assert (error["type"], error["code"], len(handle.sessions)) == ("server_error", "replica_lost", 1)
    handle = Handle(Replica(tiny, ServerSettings()), 0, 0, 0, 0)
    response = await ask(app_of(handle, retries=1))
    assert (response.status_code, error_of(response)["code"]) == (503, "replica_lost")
    assert response.headers["retry-after"]
    assert len(handle.sessions) == 2


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


async def test_signs_of_life_are_no_answer() -> None:
    """A stream that had only comments is restarted; a refusal after that is an error in the stream."""
    attempts = iter([True, False])

    async def ask_twice(request: Forwarded, session: str | None) -> AsyncGenerator[Message, None]:
        if next(attempts):
            yield START
            yield {"type": "http.response.body", "body": b": reading the prompt\n\n", "more_body": True}
            raise ReplicaLostError("a replica ended")
        yield {**START, "status": 429, "headers": [(b"content-type", b"application/json")]}
        yield {"type": "http.response.body", "body": b'{"error": {"code": "engine_busy"}}', "more_body": False}

    response = await ask(app_of(ask_twice))
    assert response.status_code == 200
    assert response.text == ': reading the prompt\n\ndata: {"error": {"code": "engine_busy"}}\n\n'


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineBusyError("all replicas are busy; secret"), 429, "rate_limit_error"),
        (RuntimeError("the prompt was: secret"), 500, "server_error"),
    ],
)
async def test_errors_of_replicas_have_their_status(error: Exception, status: int, kind: str) -> None:
    async def broken(request: Forwarded, session: str | None) -> AsyncGenerator[Message, None]:
        raise error
        yield {}

    response = await ask(app_of(broken, retry_after=7))
    assert (response.status_code, error_of(response)["type"]) == (status, kind)
    assert response.headers.get("retry-after") == ("7" if status == 429 else None)
    assert ("secret" in error_of(response)["message"]) is (status == 429)


async def test_a_gateway_that_stops_takes_no_calls_and_lets_those_that_run_end() -> None:
    drain, engine = Drain(retry_after=7), speaker("Yes, it is.", prefix_cache_mb=0)
    app = app_of(Handle(Replica(engine, ServerSettings())), drain=drain)
    with gated(engine) as gate:
        exchange = Exchange(app, {**SAYS, "stream": True})
        await happens(lambda: gate.reached > 0)
        assert len(drain) == 1

        async def slowly() -> AsyncGenerator[bytes, None]:
            yield b"{}"
            drain.begin()

        for refused in (await ask(app, slowly()), await ask(app), await ask(app, None, "/health")):
            assert (refused.status_code, error_of(refused)["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"] == "7"
        assert (await ask(app, None, "/health/live")).status_code == 200
        gate.open()
        await exchange.ended()
    assert exchange.events[-1] == "data: [DONE]"
    assert len(drain) == 0


@pytest.mark.parametrize("leaves", [False, True])
async def test_calls_whose_client_goes_or_that_run_too_long_end(leaves: bool) -> None:
    drain, engine = Drain(1), speaker(ends=False, prefix_cache_mb=0)
    app = app_of(Handle(Replica(engine, ServerSettings())), drain=drain)
    asked = {"messages": HELLO, "max_tokens": 4000}
    exchange, whole = Exchange(app, {**asked, "stream": True}), Exchange(app, asked)
    await happens(lambda: len(exchange.events) > 2 and len(drain) == 2)
    if leaves:
        exchange.leave()
        whole.leave()
    else:
        drain.end()
    await exchange.ended()
    await whole.ended()
    await happens(lambda: sequences_running(engine) == 0)
    assert len(drain) == 0
    assert "[DONE]" not in exchange.body.decode()
    if not leaves:
        assert whole.status == 503
        for sent in (exchange.events[-1].removeprefix("data: "), whole.body):
            error = json.loads(sent)["error"]
            assert (error["type"], error["code"]) == ("server_error", "shutting_down")


async def test_keys_bodies_and_hosts_are_those_of_the_server(tiny: Speaker) -> None:
    replica = Replica(tiny, ServerSettings(api_keys=("right",), host="0.0.0.0"))
    app = app_of(Handle(replica), api_keys=("right",), max_body_bytes=1000)
    assert (await ask(app)).status_code == 401
    assert (await ask(app, authorization="Bearer wrong")).status_code == 401
    assert text_of(await ask(app, authorization="Bearer right")) == "Yes, it is."

    async def chunked() -> AsyncGenerator[bytes, None]:
        yield b"x" * 2000

    for body in ({**SAYS, "user": "x" * 2000}, chunked()):
        large = await ask(app, body, authorization="Bearer right")
        assert (large.status_code, error_of(large)["code"]) == (413, "request_too_large")
    assert (await ask(app, authorization="Bearer right", host="elsewhere")).status_code == 400
    assert (await ask(app, None, "/health")).json() == {"status": "ok", "replicas": 2}
    assert (await ask(app, None, "/metrics")).status_code == 401


async def test_the_gateway_parses_no_body_in_its_event_loop_and_keeps_the_key(
    tiny: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, seen = threads_of_json(monkeypatch), []

    async def noting(request: Forwarded, session: str | None) -> AsyncGenerator[Message, None]:
        seen.append(request)
        async for messages in Replica(tiny, ServerSettings()).answer(request):
            for message in messages:
                yield message

    response = await ask(app_of(noting, api_keys=("right",)), authorization="Bearer right")
    assert response.status_code == 200
    assert threads
    assert threading.get_ident() not in threads
    assert "right" not in repr(seen[0])


async def test_without_a_key_only_the_machine_itself_is_served_and_health_needs_a_replica(tiny: Speaker) -> None:
    """Ray Serve opens the socket, so the address in the settings does not say who can reach it."""

    async def none() -> int:
        return 0

    handle = Handle(Replica(tiny, ServerSettings()))
    app = app_of(handle, ready=none)
    for refused, status, code in (
        (await ask(app, client="203.0.113.7"), 403, "no_api_key"),
        (await ask(app, None, "/health"), 503, "no_replica"),
    ):
        assert (refused.status_code, error_of(refused)["code"]) == (status, code)
    open_to_all = app_of(handle, allow_no_key=True)
    for answered in (
        await ask(app),
        await ask(open_to_all, client="203.0.113.7"),
        await ask(app, None, "/health/live"),
    ):
        assert answered.status_code == 200


async def test_metrics_of_replicas_are_one_text(tiny: Speaker) -> None:
    replica, board = Replica(tiny, ServerSettings()), Board(60)
    await ask(app_of(Handle(replica)))
    board.keep("a", replica.metrics())
    board.keep("b", replica.metrics())
    text = (await ask(app_of(Handle(replica), board=board), None, "/metrics")).text
    assert text.count("# TYPE cocoa:request_success_total counter") == 1
    for name in "ab":
        sample = f'cocoa:request_success_total{{finished_reason="eos",model_name="tiny",replica="{name}"}} 1.0'
        assert sample in text
    old = Board(-1)
    old.keep("a", replica.metrics())
    assert list(old.collect()) == []


def session(body: Any, **headers: str) -> str | None:
    return session_of(Headers(headers), body if isinstance(body, bytes) else json.dumps(body).encode())


def test_a_session_is_what_the_turns_of_a_conversation_share() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}
    turn = {"messages": [system, user]}
    later = {"messages": [system, user, {"role": "assistant", "content": "I."}, {"role": "user", "content": "Why?"}]}
    other = {"messages": [system, {"role": "user", "content": "When?"}]}
    assert session(turn) == session(later) != session(other)
    assert session({**turn, "temperature": 1}) == session(turn)
    assert session({**turn, "tools": [{"type": "function"}]}) != session(turn)
    assert session({"prompt": "Once"}) == session({"prompt": "Once", "max_tokens": 3}) != session({"prompt": "Twice"})
    assert session(turn, **{"x-session-id": "mine"}) == session(other, **{"x-session-id": "mine"}) == "mine"
    assert session({**turn, "prompt_cache_key": "key"}) == "key"
    for nothing in (b"", b"{", b"[]", {}, {"messages": []}, {"messages": 3}):
        assert session(nothing) is None
    assert session(b"[" * 100_000) is None
    assert session({"prompt": "\ud800"}) is not None
    assert len(session({}, **{"x-session-id": "x" * 5000}) or "") == 256
