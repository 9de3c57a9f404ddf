"""Bodies of the maximum size: refused by name, at a bounded cost, and never read in the event loop.

Schemas that are slow to compile, too long for the model, or cannot be looked at, as a client sees them.
"""

import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import confined
from cocoa_engine.confined import FORKS
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server import middleware as body_module
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.middleware import LARGE, Bodies, parsed
from cocoa_integrations.server.protocol.requests import ChatRequest, CompletionRequest, DecodingRequest, ScoreRequest
from tests.helpers.in_threads import happens
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import CHAT, HELLO, client_of, error_of, post, refusal, threads_of_json

SIZE = LARGE + 4_000
"""Of a large body; the cost of a larger one grows with it."""
ROUTES: dict[type[DecodingRequest], tuple[str, dict[str, Any]]] = {
    ChatRequest: (CHAT, {"messages": HELLO, "max_tokens": 1}),
    CompletionRequest: ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ScoreRequest: ("/v1/cocoa/score", {"prompt": "Hi", "text": "you"}),
}
SURROGATE = '"\\ud800"'
ELEMENTS = ["1", "[]", "{}", '"a"', "[1]", '{"role":"user"}', "NaN", SURROGATE]


def collections(schema: dict[str, Any], whole: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The paths to the lists and dicts in a schema, each with ``[`` or ``{``; ``*`` is an element of a list."""
    if "$ref" in schema:
        yield from collections(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
        return
    for one in schema.get("anyOf", []):
        yield from collections(one, whole)
    kind = schema.get("type")
    if kind == "array" or (kind is None and "anyOf" not in schema and "const" not in schema and "enum" not in schema):
        yield (), "["
        for path, opening in collections(schema.get("items", {"type": "null"}), whole):
            yield ("*", *path), opening
    if kind == "object":
        yield (), "{"
        for name, inner in schema.get("properties", {}).items():
            for path, opening in collections(inner, whole):
                yield (name, *path), opening


UNKNOWN = ["foo", "metadata", "guided_json", "messages.*.cocoa_risk"]
PATHS = {
    (path, opening, route.__name__ if path[0] == "prompt" else ""): route
    for route in reversed(ROUTES)
    for path, opening in collections(route.model_json_schema(), route.model_json_schema())
    if path
} | {(tuple(name.split(".")), "[", ""): ChatRequest for name in UNKNOWN}
"""One route for each list or dict: all routes have the same models of the fields that they share, but for prompts."""


def filled(opening: str, element: str) -> str:
    """A list or dict of the maximum size, as JSON."""
    if opening == "[":
        return f"[{','.join([element] * (SIZE // (len(element) + 1)))}]"
    count = SIZE // (len(element) + 11)
    prefix = SURROGATE[1:-1] if element == SURROGATE else ""
    return "{" + ",".join(f'"{prefix}{number:07}":{element}' for number in range(count)) + "}"


def placed(path: tuple[str, ...], value: str) -> str:
    """JSON with a value at a path."""
    for name in reversed(path):
        value = f"[{value}]" if name == "*" else json.dumps(name).join(("{", f":{value}}}"))
    return value


def body_of(route: type[DecodingRequest], path: tuple[str, ...], value: str) -> bytes:
    others = {name: one for name, one in ROUTES[route][1].items() if name != path[0]}
    if path[0] in ("messages", "prompt", "text", "texts"):
        pair = {"messages": "prompt", "prompt": "messages", "text": "texts", "texts": "text"}[path[0]]
        others.pop(pair, None)
    inner = placed(path[1:], value)
    if path[:2] == ("messages", "*") and len(path) > 2:  # a message has a role
        inner = inner.replace("{", '{"role":"assistant",', 1)
    return (json.dumps(others)[:-1] + f",{json.dumps(path[0])}:{inner}}}").encode()


def call(value: Any, written: Callable[[Any], Any] = lambda value: {"a": value}) -> dict[str, Any]:
    """A message with a call."""
    function = {"name": "f", "arguments": written(value)}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


assert {("messages", "*", "tool_calls"), ("cocoa", "stop"), ("prompt", "*")} <= {path for path, *_ in PATHS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PATHS), ids=lambda kind: ".".join(kind[0]))
async def test_a_body_costs_no_more_than_its_values_whatever_they_are(
    tiny: Speaker, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """It is refused by the name of what is wrong, and nothing of it runs in the event loop."""
    path, opening, _ = kind
    threads, route = threads_of_json(monkeypatch), PATHS[kind]
    app = create_app(tiny)
    async with client_of(app, **{"content-type": "application/json"}) as client:
        for element in ELEMENTS:
            body = body_of(route, path, filled(opening, element))
            threads.clear()
            tracemalloc.start()
            response = await client.post(ROUTES[route][0], content=body)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert threads
            assert threading.get_ident() not in threads
            assert peak < 100 * len(body), (element, peak)
            if response.status_code == 200:  # some are right: an empty dict among others
                continue
            assert response.status_code == 400
            error = error_of(response)
            assert path[0] in f"{error['param']}: {error['message']}"
            assert len(response.content) < 2000


@pytest.mark.parametrize("route", ROUTES)
async def test_the_event_loop_goes_on_while_a_small_body_is_checked(
    tiny: Speaker, monkeypatch: pytest.MonkeyPatch, route: Any
) -> None:
    threads, (path, body) = threads_of_json(monkeypatch), ROUTES[route]
    assert (await post(create_app(tiny), body, path)).status_code == 200
    assert threads
    assert threading.get_ident() not in threads


NOT_IN_PROMPTS = {"model", "stop", "stream_options", "logit_bias", "cocoa", "tool_choice", "source"}


@pytest.mark.parametrize("route", ROUTES)
def test_all_that_a_prompt_may_contain_is_counted(route: type[DecodingRequest]) -> None:
    """Numbers, names and separators as well as texts; what is not counted cannot reach a prompt."""
    properties = route.model_json_schema()["properties"]
    kinds = {name: {one.get("type") for one in field.get("anyOf", [field])} for name, field in properties.items()}
    named = {name for name, kind in kinds.items() if kind & {"string", "array", "object", None}}
    assert named - NOT_IN_PROMPTS == set(route.in_prompt)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 1001},
        {"prompt": [[1] * 501] * 2},
        {"prompt": ["a" * 501] * 2},
        {"prompt": [1] * 1001, "text": "a"},
        {"text": "a" * 1001, "prompt": "a"},
        {"response_format": {"type": "json_object", "schema": {"enum": [1.5] * 300}}},
        {"response_format": {"type": "json_object", "schema": {"enum": [None] * 300}}},
        {"response_format": {"type": "json_object", "schema": {"enum": [[]] * 900}}},
        {"chat_template_kwargs": {"documents": [True] * 300}},
        {"chat_template_kwargs": {"documents": {f"{number}": 1 for number in range(200)}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [12345] * 200}}}]},
        {"messages": [{**HELLO[0], "name": "n" * 1001}]},
        {"messages": [*HELLO, {"role": "tool", "tool_call_id": "i" * 1001, "content": ""}]},
        {"messages": [*HELLO, {"role": "assistant", "reasoning_content": "i" * 1001}]},
        {"messages": [*HELLO, call(list(range(300)))]},
        {"reasoning_effort": "x" * 1001},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\x01" * 170}}]},
        {"response_format": {"type": "json_object", "schema": {"description": '"' * 500}}},
        {"chat_template_kwargs": {"documents": ["\\" * 500]}},
        {"messages": [call("\x01" * 170)]},
        {"messages": [call(json.dumps("\x01" * 170), '{{"a": {}}}'.format)]},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_the_prompt_is_counted_before_it_is_rendered(tiny: Speaker, body: dict[str, Any]) -> None:
    """Token ids count as characters."""
    route = ScoreRequest if "text" in body else CompletionRequest if "prompt" in body else ChatRequest
    error = await refusal(tiny, ServerSettings(max_prompt_chars=1000), ROUTES[route][0], **body)
    assert error["param"] == next(iter(body))
    assert "the server's limit of 1000" in error["message"]


@given(st.lists(st.text(), min_size=1), st.sampled_from(["text", "input_text", "output_text", "refusal"]))
def test_the_text_of_a_message_counts_as_it_is_in_one_part_or_many(texts: list[str], kind: str) -> None:
    parts = [{"type": kind, "refusal" if kind == "refusal" else "text": text, "cache_control": {}} for text in texts]
    whole = {"role": "user", "content": "".join(texts)}
    sizes = [
        route.model_validate({**ROUTES[ChatRequest][1], "texts": texts, "messages": [*HELLO, message]}).size_of(name)
        for route, name in ((ChatRequest, "messages"), (ScoreRequest, "messages"))
        for message in (whole, {"role": "user", "content": parts})
    ]
    without = ChatRequest.model_validate({"messages": [*HELLO, {"role": "user"}]}).size_of("messages")
    assert sizes == [without + len("".join(texts))] * 4
    assert ScoreRequest.model_validate({"prompt": "Hi", "texts": texts}).size_of("texts") == len("".join(texts))


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (ChatRequest, {"messages": [{**HELLO[0], "reasoning_content": "a" * 400, "tool_call_id": "a" * 400}]}),
        (ChatRequest, {"messages": [{**HELLO[0], "tool_calls": [{"x": "a" * 400}]}]}),
        (ChatRequest, {"messages": [*HELLO, {**call(1), "cocoa_risk": "a" * 400}]}),
        (ChatRequest, {"messages": HELLO, "cocoa": {"source": ["a" * 400]}}),
        (ScoreRequest, {"prompt": "Hi", "text": "you", "source": ["a" * 400]}),
    ],
)
def test_what_no_prompt_contains_does_not_count(route: type[DecodingRequest], body: dict[str, Any]) -> None:
    route.read(body, ServerSettings(max_prompt_chars=200))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "missing or is not JSON"),
        (b"[1]", "missing or is not JSON"),
        (b'{"messages": [', "is not JSON: Expecting value at character 14"),
        (b'{"messages": "\xff"}', "is not JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
async def test_bodies_that_are_no_objects(tiny: Speaker, body: bytes, message: str) -> None:
    async with client_of(create_app(tiny), **{"content-type": "application/json"}) as client:
        response = await client.post(CHAT, content=body)
    assert response.status_code == 400
    assert message in error_of(response)["message"]
    assert error_of(response)["param"] is None


class Upload:
    """A body that comes when the test lets it."""

    def __init__(self, size: int) -> None:
        self.read = 0
        self._parts = [b" " * LARGE] * (size // LARGE)
        self.goes_on = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if len(self._parts) == 1:
            await happens(self.goes_on.is_set)
        part = self._parts.pop()
        self.read += len(part)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}


async def size_of(bodies: Bodies, upload: Upload, parsing: asyncio.Event | None = None) -> int:
    async with bodies.read(upload.receive) as body:
        if parsing is not None:
            await happens(parsing.is_set)
        return len(body)


@pytest.mark.parametrize("complete", [False, True])
async def test_few_large_bodies_are_in_memory_and_small_ones_do_not_wait(complete: bool) -> None:
    """Neither while they come, nor while those before them are complete, and wait for their turn to be parsed."""
    bodies, parsing = Bodies(10 * LARGE, at_once=2), asyncio.Event()
    uploads, small = [Upload(10 * LARGE) for _ in range(30)], Upload(LARGE)
    for upload in (*uploads, small) if complete else (small,):
        upload.goes_on.set()
    tasks = [asyncio.ensure_future(size_of(bodies, upload, parsing if complete else None)) for upload in uploads]
    if complete:
        await happens(lambda: sum(upload.read for upload in uploads) >= 2 * 10 * LARGE)
    for _ in range(1000):
        await asyncio.sleep(0)
    # the first two go on to their ends; most of the others stays in the sockets
    assert sum(upload.read for upload in uploads) <= (2 * 10 + 2 * 10 + 2 * 30) * LARGE
    assert await size_of(bodies, small) == LARGE
    parsing.set()
    for upload in uploads:
        upload.goes_on.set()
    assert await asyncio.gather(*tasks) == [10 * LARGE] * 30


@pytest.mark.slow
@pytest.mark.parametrize(("stalled", "healthy"), [(2, 10), (10, 2), (10, 10)])
async def test_bodies_that_do_not_come_keep_no_other_waiting(
    stalled: int, healthy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are dropped only where they take the memory that another needs."""
    monkeypatch.setattr(body_module, "_HURRY", 0.2)
    bodies = Bodies(10 * LARGE, at_once=8)
    tasks = [asyncio.ensure_future(size_of(bodies, Upload(stalled * LARGE))) for _ in range(30)]
    for _ in range(1000):
        await asyncio.sleep(0)
    other = Upload(healthy * LARGE)
    other.goes_on.set()
    assert await asyncio.wait_for(size_of(bodies, other), 25) == healthy * LARGE
    for task in tasks:
        task.cancel()
    errors = [one for one in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(one, ApiError)]
    assert all(error.code == "request_timeout" for error in errors)
    assert bool(errors) is (stalled == healthy)


@pytest.mark.parametrize("size", [0, 1])
async def test_a_large_body_that_does_not_come_is_dropped(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A byte now and then does not count."""
    monkeypatch.setattr(body_module, "_HURRY", 0.01)
    monkeypatch.setattr(body_module, "_PATIENCE", 0.05)
    begun = False

    async def receive() -> dict[str, Any]:
        nonlocal begun
        if begun:
            await asyncio.sleep(0.002 if size else 30)
        part, begun = b" " * (size if begun else 2 * LARGE), True
        return {"type": "http.request", "body": part, "more_body": True}

    with pytest.raises(ApiError) as caught:
        async with Bodies(10**7).read(receive):
            pass
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")


async def test_a_full_server_parses_no_body(tiny: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threads_of_json(monkeypatch)
    app = create_app(tiny)
    most = tiny.runtime.max_batch_size + tiny.runtime.max_queue
    body = body_of(ChatRequest, ("messages",), filled("[", "1"))
    async with AsyncExitStack() as others, client_of(app, **{"content-type": "application/json"}) as client:
        for _ in range(most):
            await others.enter_async_context(app.state.cocoa.calls.opened(tiny, asyncio.Event().wait))
        assert (await client.post(CHAT, content=body)).status_code == 429
    assert threads == []


def test_collections_of_garbage_go_on_after_a_body() -> None:
    assert gc.isenabled()
    for body in (b"{}", b" " * LARGE + b"{}", b" " * LARGE + b"{"):
        with suppress(ApiError):
            parsed(body)
        assert gc.isenabled()


forks = pytest.mark.skipif(not FORKS, reason="limits need forked processes")


def asking(schema: dict[str, Any], **rest: Any) -> dict[str, Any]:
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": HELLO, "max_tokens": 4, "response_format": response_format, **rest}


@forks
@pytest.mark.slow
async def test_slow_schemas_leave_places_for_others(
    listen: Callable[[FastAPI], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined, "CPU_SECONDS", 1000.0)  # they end for their memory
    engine = speaker(max_batch_size=2, max_queue=14)
    app = create_app(engine, ServerSettings())
    url, statuses = listen(app).url, []
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=200)) as client:
        quick = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        assert (await client.post(CHAT, json=asking(quick))).status_code == 200

        async def ask_slowly(at: int) -> None:
            slow = {"type": "integer", "multipleOf": 99999989 + 2 * at}
            statuses.append((await client.post(CHAT, json=asking(slow, n=2))).status_code)

        slow = []
        for at in range(12):  # with n=2 these ask for more answers than are decoded and queued
            slow.append(asyncio.ensure_future(ask_slowly(at)))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while len(statuses) < 8:  # the others have half of the places
                await asyncio.sleep(0.05)
        for body in (asking(quick), {"messages": HELLO, "max_tokens": 4}):
            assert (await client.post(CHAT, json=body)).status_code == 200
        assert not all(each.done() for each in slow)
        for each in slow:
            each.cancel()


@forks
async def test_what_does_not_fit_the_model_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(speaker(), ServerSettings())
    many = {"type": "object", "properties": {f"property_{at}": {"type": "integer"} for at in range(2000)}}
    monkeypatch.setattr(confined, "started", lambda *_, **__: pytest.fail("compiled"))
    response = await post(app, asking(many))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@forks
async def test_a_process_that_cannot_start_is_the_fault_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    app, asked = create_app(speaker(), ServerSettings()), asking({"type": "boolean"})
    with monkeypatch.context() as patched:
        patched.setattr(confined, "_server", None)
        patched.setattr(confined, "_spares", [])
        patched.setattr("multiprocessing.spawn._python_exe", "/bin/true")
        response = await post(app, asked)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker"
    assert (await post(app, asked)).status_code == 200


@forks
async def test_the_tools_of_a_request_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the check of a request, the compilation and the comparison of the answer look at."""
    budgets = []
    started = confined.started

    def watched(*args: Any, budget: confined.Budget | None = None, **options: Any) -> Any:
        budgets.append(budget or confined.current_budget())
        return started(*args, budget=budget, **options)

    monkeypatch.setattr(confined, "started", watched)
    monkeypatch.setattr("cocoa_engine.decoding.grammar.started", watched)
    app = create_app(speaker(), ServerSettings())
    for _ in range(2):
        await post(app, asking({"type": "boolean"}, n=2, max_tokens=12))
    assert len(budgets) > 4
    assert len({id(each) for each in budgets}) == 2
