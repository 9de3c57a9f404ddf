"""A server under load and among strangers: queues, disconnects, errors, keys, limits, logs, and its page.

What Prometheus reads of what it has answered, and one OpenTelemetry span for each request.
"""

import asyncio
import json
import logging
import re
import sys
import threading
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from cocoa_engine import METHODS, CocoaConfig, ConfigError
from cocoa_engine.errors import ModelLoadError
from cocoa_engine.rendering.highlights import BOUNDS
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.errors import bad_request, body_of, log_unexpected, response_of
from cocoa_integrations.server.routes.page import SETTINGS
from cocoa_integrations.server.work import event
from tests.helpers.alike import near
from tests.helpers.in_threads import happens
from tests.helpers.inside import Gate, assert_idle, failing, gated, sequences_running
from tests.helpers.reasoning_models import Obedient, Speaker, speaker
from tests.helpers.served import CHAT, COMPLETIONS, HELLO, SCORE, Exchange, chat, client_of, error_of, post, refusal
from tests.helpers.span_handlers import Spans

LONG = {"messages": HELLO, "max_tokens": 400}
KEY = "correct-horse-battery"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_the_queue_holds_is_refused_at_once(endless: Speaker, gate: Gate, stream: bool) -> None:
    """By the app that has admitted the others, and by the engine if that was another app."""
    app, another = (create_app(endless, ServerSettings(retry_after=3)) for _ in range(2))
    scheduler = endless.session.scheduler
    admitted = [Exchange(app, {**LONG, "max_tokens": 3, "stream": stream}) for _ in range(4)]
    await happens(lambda: (scheduler.running, scheduler.waiting) == (2, 2))
    for exchange in [Exchange(each, {**LONG, "stream": stream}) for each in (app, app, another)]:
        await exchange.ended()
        assert exchange.status == 429
        assert exchange.headers["retry-after"] == "3"
        assert exchange.headers["content-type"] == "application/json"
        error = json.loads(exchange.body)["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "engine_busy", None)
    gate.open()
    for exchange in admitted:
        await exchange.ended()
        assert exchange.status == 200
    assert (await chat(endless, max_tokens=1))["choices"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_many_answers_holds_up_others_by_one(stream: bool) -> None:
    engine = speaker(ends=False, max_batch_size=1, prefix_cache_mb=0)
    app = create_app(engine)
    many = Exchange(app, {"prompt": [f"Prompt {n}" for n in range(40)], "max_tokens": 8, "stream": stream}, COMPLETIONS)
    await happens(lambda: engine.session.scheduler.waiting > 20)
    other = Exchange(app, {**LONG, "max_tokens": 4, "stream": stream})
    await other.ended()
    assert other.status == 200
    assert engine.session.scheduler.waiting > 10
    many.leave()
    await many.ended()
    await happens(lambda: engine.session.scheduler.idle)


async def test_a_stream_that_is_never_read_ends(endless: Speaker, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(endless, ServerSettings(write_timeout=0.2))
    stream = Exchange(app, {**LONG, "stream": True}, reads=False)
    await stream.ended()
    assert b"[DONE]" not in stream.body
    assert "read nothing for 0.2 seconds" in caplog.text
    await happens(lambda: len(app.state.cocoa.calls) == 0)
    assert 'cancelled_total{by="client"' in (metrics := (await client_of(app).get("/metrics")).text), metrics
    assert_idle(endless)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, LONG), (COMPLETIONS, {"prompt": "Long", "max_tokens": 400})])
async def test_work_whose_task_is_cancelled_ends_within_one_pass(
    endless: Speaker, gate: Gate, stream: bool, path: str, body: dict[str, Any]
) -> None:
    """Ray Serve ends a call so."""
    app = create_app(endless)
    gate.allow(20)
    exchange = Exchange(app, {**body, "stream": stream}, path)
    await happens(lambda: gate.reached == 21)  # the pass that waits has begun
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    gate.allow(100)
    await happens(lambda: sequences_running(endless) == 0)
    assert gate.reached == 21
    assert len(app.state.cocoa.calls) == 0


async def test_an_unexpected_error_says_nothing_of_the_inside(
    endless: Speaker, caplog: pytest.LogCaptureFixture
) -> None:
    with failing(endless, ZeroDivisionError("a secret of the prompt")):
        whole = await post(create_app(endless), LONG)
        streamed = await post(create_app(endless), {**LONG, "stream": True})
    for response in (whole, streamed):
        error = error_of(response)
        assert response.status_code == 500
        assert error["type"] == "server_error"
        assert "ZeroDivisionError" in error["message"]
        assert "secret" not in error["message"]
    assert "inside.py" in caplog.text  # where it was raised
    assert "secret" not in caplog.text
    with failing(endless, ZeroDivisionError("a secret of the prompt")):
        await post(create_app(endless, ServerSettings(log_prompts=True)), LONG)
    assert "a secret of the prompt" in caplog.text
    assert_idle(endless)


async def test_a_loading_server_says_so() -> None:
    engine, go = speaker(), threading.Event()

    def load() -> Speaker:
        assert go.wait(60)
        return engine

    app = create_app(load)
    async with app.router.lifespan_context(app), client_of(app) as client:
        for path in ("/health", "/ready", "/health/ready", "/v1/models"):
            response = await client.get(path)
            assert response.status_code == 503
            assert error_of(response)["code"] == "model_loading"
            assert int(response.headers["retry-after"]) >= 1
        assert (await client.post(CHAT, json=LONG)).status_code == 503
        assert (await client.get("/health/live")).json() == {"status": "loading"}
        go.set()
        await happens(lambda: app.state.cocoa.phase == "ready")
        assert (await client.get("/health")).json() == {"status": "ok"}
        [model] = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 4096)
        assert (await client.get("/models/tiny")).json() == model
        assert (await client.post(CHAT, json={**LONG, "max_tokens": 1})).status_code == 200
    assert app.state.cocoa.phase == "draining"
    async with app.router.lifespan_context(app), client_of(app) as client:  # the model is still loaded
        assert (await client.get("/health")).status_code == 200


async def test_a_model_that_cannot_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(Mock(side_effect=ModelLoadError("\x1b[31m" + "shape " * 10_000)))
    async with app.router.lifespan_context(app), client_of(app) as client:
        await happens(lambda: app.state.cocoa.phase == "failed")
        response = await client.get("/health")
    assert (response.status_code, error_of(response)["code"]) == (503, "model_failed")
    assert isinstance(app.state.cocoa.error, ModelLoadError)
    log_unexpected(RuntimeError("\x1b[31m" + "shape " * 10_000), with_message=True)
    messages = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(messages) == 2
    for message in messages:  # is short
        assert "shape" in message
        assert "\x1b" not in message
        assert len(message) < 1000


async def test_the_end_of_the_lifespan_ends_streams_with_an_error(endless: Speaker, gate: Gate) -> None:
    app = create_app(endless)
    gate.allow(20)
    async with app.router.lifespan_context(app):
        exchange = Exchange(app, {**LONG, "stream": True})
        await happens(lambda: gate.reached == 21 and b"data" in exchange.body)
        whole = Exchange(app, LONG)  # not earlier: it would take some of the passes
        await happens(lambda: len(app.state.cocoa.calls) == 2)
    gate.open()
    await exchange.ended()
    await whole.ended()
    error = json.loads(exchange.events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "shutting_down"
    assert (whole.status, json.loads(whole.body)["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": "bearer other-key"}, 200),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({}, 401),
    ],
)
async def test_keys(endless: Speaker, given: dict[str, str], status: int) -> None:
    app = create_app(endless, ServerSettings(api_keys=(KEY, "other-key")))
    async with client_of(app, **given) as client:
        for path in ("/v1/models", "/models", "/openapi.json"):
            assert (await client.get(path)).status_code == status
        for path in (CHAT, "/chat/completions"):
            response = await client.post(path, json={**LONG, "max_tokens": 1})
            assert response.status_code == status
            if status == 401:
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/nowhere", "/health/x", "/%2e/health", "/HEALTH"):
            assert (await client.get(path)).status_code == (401 if status == 401 else 404)
        for path in ("/health", "/ready", "/health/ready", "/health/live"):
            assert (await client.get(path)).status_code == 200
    transport = httpx.ASGITransport(app=app, root_path="/cocoa")
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=given) as client:
        assert (await client.get("/cocoa/health")).status_code == 200
        assert (await client.get("/cocoa/v1/models")).status_code == status


REFUSED = [
    *(({"host": host}, "give a key") for host in ("0.0.0.0", "::", "example.org")),
    *(({"api_keys": (key,)}, "header cannot carry") for key in ("a b", "ключ")),
    ({"api_keys": ("",)}, "key 0 is empty"),
    ({"api_keys": (KEY, f"{KEY}é")}, "key 1 is empty, or has characters"),
    ({"porte": 1}, "did you mean 'port'"),
    ({"max_n": 0}, "max_n"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        ServerSettings(**settings)
    assert KEY not in str(refused.value)


def test_hosts_of_this_machine_need_no_key_and_others_one_unless_allowed() -> None:
    for host in ("localhost", "::1", "127.0.0.2"):
        assert ServerSettings(host=host).host == host
    for settings in ({"api_keys": (KEY,)}, {"allow_no_key": True}):
        assert KEY not in repr(ServerSettings(host="0.0.0.0", **settings))


ATTACKERS = ["attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", ""]


@pytest.mark.parametrize(
    ("settings", "hosts", "refused"),
    [
        ({}, ["127.0.0.1:8000", "LocalHost", "[::1]:8000"], ATTACKERS),
        ({"allowed_hosts": ("cocoa.example",)}, ["cocoa.example"], ["localhost"]),
        ({"host": "0.0.0.0", "api_keys": (KEY,)}, ["anything"], []),
        ({"allowed_hosts": ("*",)}, ["anything"], []),
    ],
)
async def test_hosts(endless: Speaker, settings: dict[str, Any], hosts: list[str], refused: list[str]) -> None:
    app = create_app(endless, ServerSettings(**settings))
    for host in (*hosts, *refused):
        response = await client_of(app, host=host).get("/health")
        assert response.status_code == (400 if host in refused else 200), host
        assert host in hosts or error_of(response)["code"] == "unknown_host"


async def test_no_page_of_another_site_is_served(endless: Speaker) -> None:
    app = create_app(endless)
    async with client_of(app, origin="https://attacker.example") as client:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        preflight = await client.options(CHAT, headers=asked)
        assert preflight.status_code == 405
        answered = await client.post(CHAT, json={**LONG, "max_tokens": 1})
        for response in (preflight, answered):
            assert not [name for name in response.headers if name.startswith("access-control-")]
        # what a page can send without asking first is not JSON
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            simple = await client.post(CHAT, content=json.dumps(LONG), headers={"content-type": kind})
            assert simple.status_code == 400
            assert "Content-Type: application/json" in error_of(simple)["message"]
        nothing = await client.post(CHAT, content=json.dumps(LONG))
        assert "content-type" not in nothing.request.headers
        assert nothing.status_code == 400


async def test_a_compressed_body_is_refused(endless: Speaker) -> None:
    body = {**LONG, "max_tokens": 1}
    for coding, status in (("gzip", 415), ("br", 415), ("identity", 200)):
        answered = await post(create_app(endless), body, **{"content-encoding": coding})
        assert answered.status_code == status
        if status == 415:
            assert f"Content-Encoding: {coding}" in error_of(answered)["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nope", None, 404, "not_found"),
        ("GET", "/docs", None, 404, "not_found"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", None, 405, "method_not_allowed"),
        ("POST", CHAT, b'{"messages": 3}', 400, None),
        ("GET", "/v1/models/%00%ff", None, 404, "model_not_found"),
    ],
)
async def test_every_error_has_openais_shape(
    endless: Speaker, method: str, path: str, content: bytes | None, status: int, code: str | None
) -> None:
    async with client_of(create_app(endless), **{"content-type": "application/json"}) as client:
        response = await client.request(method, path, content=content)
        assert response.status_code == status, response.text
        assert error_of(response)["code"] == code
        if status == 405:
            assert response.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/embeddings", f"{CHAT}{CHAT}", "/v1", "/" + "a" * 5000])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_address_is_answered_with_the_known_ones(endless: Speaker, method: str, path: str) -> None:
    async with client_of(create_app(endless)) as client:
        message = error_of(await client.request(method, path))["message"]
    assert path[:100] in message
    assert all(known in message for known in (CHAT, COMPLETIONS, "/v1/models"))
    assert len(message) < 800


def test_an_error_that_quotes_half_a_character_can_be_sent() -> None:
    for sent in (response_of(bad_request("\ud800", "a\ud800")).body, event(body_of(bad_request("\ud800", None)))):
        assert json.loads(bytes(sent).decode().removeprefix("data: "))["error"]["message"] == "<U+D800>"


def nested(depth: int) -> Any:
    value: Any = "end"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("settings", "body", "param"),
    [
        ({"max_messages": 2}, {"messages": HELLO * 3}, "messages"),
        ({"max_prompt_chars": 10}, {"messages": [{"role": "user", "content": "eleven char"}]}, "messages"),
        ({"max_n": 2}, {"n": 3}, "n"),
        ({"max_n": 8}, {"n": 5}, "n"),  # more than are decoded and queued
        ({}, {"prompt": ["a"] * 5}, "prompt"),
        ({"max_stop": 2}, {"stop": ["a", "b", "c"]}, "stop"),
        ({"max_stop": 2}, {"cocoa": {"stop": ["a", "b", "c"]}}, "cocoa.stop"),
        ({"max_tools": 1}, {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"max_answer_tokens": 50}, {"max_tokens": 51}, "max_tokens"),
        ({"max_answer_tokens": 50}, {"cocoa": {"max_new_tokens": 51}}, "cocoa.max_new_tokens"),
        ({"max_candidates": 10}, {"cocoa": {"max_candidates": 11}}, "cocoa.max_candidates"),
        ({"max_span_tokens": 10}, {"cocoa": {"max_span_tokens": 11}}, "cocoa.max_span_tokens"),
        ({"max_json_depth": 5}, {"chat_template_kwargs": nested(5)}, "chat_template_kwargs"),
        ({}, {"tools": [nested(80)]}, "tools"),
        ({}, {"response_format": nested(80)}, "response_format"),
    ],
)
async def test_limits(endless: Speaker, settings: dict[str, Any], body: dict[str, Any], param: str) -> None:
    more, path = {} if "cocoa" in body else {"max_tokens": 2}, COMPLETIONS if "prompt" in body else CHAT
    error = await refusal(endless, ServerSettings(**settings), path, **{**more, **body})
    assert error["param"] == param
    assert "the server's limit" in error["message"]


async def test_what_is_just_within_the_limits(endless: Speaker) -> None:
    settings = ServerSettings(max_messages=3, max_n=4, max_stop=2, max_answer_tokens=4, max_json_depth=5)
    body = {"messages": HELLO * 3, "n": 4, "stop": ["ab", "cd"], "max_tokens": 4, "chat_template_kwargs": nested(4)}
    assert len((await chat(endless, settings, **body))["choices"]) == 4


async def test_bodies_that_are_too_large_are_not_read(endless: Speaker) -> None:
    app = create_app(endless, ServerSettings(max_body_bytes=1000))

    async def parts() -> Any:
        for _ in range(100):
            sent.append(100)
            yield b" " * 100

    sent: list[int] = []
    async with client_of(app, **{"content-type": "application/json"}) as client:
        declared = await client.post(CHAT, content=b" " * 1001)
        chunked = await client.post(CHAT, content=parts())
        lying = await client.post(CHAT, content=parts(), headers={"content-length": "5"})
        for response in (declared, chunked, lying):
            assert response.status_code == 413
            assert error_of(response)["code"] == "request_too_large"
        assert sum(sent) < 3000
        sent.clear()
        assert (await client.post(CHAT, content=parts(), headers={"content-length": "10000"})).status_code == 413
        assert sent == []
        fits = json.dumps({**LONG, "max_tokens": 1}).encode().ljust(1000)
        assert (await client.post(CHAT, content=fits)).status_code == 200


STRANGE = "my-secret\nERROR: a forged line\u2028and another\x1b[31m"
FIELD = {"type": "string", "format": STRANGE, "maxLength": 2}
SCHEMA = {"type": "object", "properties": {"a": FIELD, STRANGE: FIELD}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FUNCTION = {"type": "function", "function": {"name": STRANGE, "description": STRANGE, "parameters": SCHEMA}}
CALL = {"id": STRANGE, "type": "function", "function": {"name": STRANGE, "arguments": STRANGE}}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object", "schema": FIELD}},
        {"response_format": {"type": "json_object", "schema": {"not": {"const": STRANGE}}}},
        {"response_format": {"type": STRANGE}},
        {"tools": [FUNCTION]},
        {"tools": [FUNCTION], "tool_choice": "required"},
        {"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "name": "f", "strict": True}}]},
        {"tool_choice": STRANGE},
        {"messages": [{"role": "user", "content": STRANGE, "name": STRANGE}]},
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]},
        {"model": STRANGE},
        {"stop": STRANGE},
        {"logit_bias": {STRANGE: 1}},
        {"chat_template_kwargs": {STRANGE: STRANGE}},
        {"cocoa": {STRANGE: STRANGE}},
        {"cocoa": {"source": [STRANGE]}},
        {STRANGE: STRANGE, "user": STRANGE},
    ],
    ids=lambda body: next(iter(body)).replace(STRANGE, "unknown"),
)
async def test_no_text_of_a_request_reaches_a_log(
    endless: Speaker, caplog: pytest.LogCaptureFixture, body: dict[str, Any]
) -> None:
    """Of any logger. With --log-prompts it does, and stays in its line."""
    caplog.set_level(logging.DEBUG)
    for log_prompts in (False, True):
        caplog.clear()
        for stream in (False, True):
            app = create_app(endless, ServerSettings(log_prompts=log_prompts))
            await post(app, {"messages": HELLO, "max_tokens": 2, **body, "stream": stream})
        own = [record.getMessage() for record in caplog.records if record.name.startswith("cocoa")]
        text = "".join(own)
        assert log_prompts or "my-secret" not in text
        if "messages" in body and "user" in str(body):
            assert ("my-secret" in text) == log_prompts
            assert text.count("2 new tokens, finish reason length") == 2
        assert not any(line.startswith("ERROR: a forged") for text in own for line in text.splitlines())
        assert "\x1b" not in "".join(own)


def visitor(**settings: Any) -> TestClient:
    return TestClient(create_app(Obedient(), ServerSettings(**settings)), base_url="http://127.0.0.1")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_is_self_contained_and_its_policy_allows_its_own_styles_and_scripts_only() -> None:
    here = visitor()
    answers = [here.get("/") for _ in range(2)]
    nonces = []
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == "'none'"
        (nonce,) = set(re.findall(r'nonce="(.*?)"', answer.text))
        assert rules["script-src"] == rules["style-src"] == f"'nonce-{nonce}'"
        nonces.append(nonce)
    assert nonces[0] != nonces[1]
    page = answers[0].text
    assert "{style}" not in page
    assert not re.search(r'(?:src|href)="(?!data:)|\burl\(|@import|https?://|\son\w+="|\sstyle="', page)
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert unsafe not in page


def test_the_page_knows_the_settings_and_the_levels_of_the_engine() -> None:
    engine = Obedient()
    engine.config = CocoaConfig(method="greedy", alpha=1.25)
    data = data_of(TestClient(create_app(engine), base_url="http://127.0.0.1").get("/").text)
    assert data["methods"] == list(METHODS)
    assert data["method"] == "greedy"
    assert data["bounds"] == list(BOUNDS[1:-1])
    assert data["needs_key"] is False
    fields = {one["name"]: one for one in data["settings"]}
    assert list(fields) == list(SETTINGS)
    assert fields["alpha"]["default"] == 1.25
    assert fields["alpha"]["step"] == "any"
    assert fields["seed"]["step"] == "1"
    assert "fixed" in fields["span_boundary"]["choices"]
    assert fields["gamma"]["description"] == CocoaConfig.model_fields["gamma"].description


def test_the_page_needs_no_key_and_no_loaded_model() -> None:
    locked = visitor(api_keys=("secret",))
    page = locked.get("/")
    assert page.status_code == 200
    assert data_of(page.text)["needs_key"] is True
    assert "secret" not in page.text
    assert locked.get("/v1/models").status_code == 401
    loading = TestClient(create_app(Obedient), base_url="http://127.0.0.1")  # its lifespan has not begun
    assert loading.get("/").status_code == 200
    assert loading.get("/v1/models").status_code == 503


ASKED = {"messages": HELLO, "max_tokens": 12}
NAMES = {
    *("num_requests_running", "num_requests_waiting", "prefix_cache_queries", "prefix_cache_hits"),
    *("prompt_tokens", "generation_tokens", "request_success", "request_prompt_tokens", "request_generation_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("spans", "risk_points", "flagged_spans", "span_risk", "answer_max_risk"),
    *("scored_texts", "cancelled", "rejected"),
}


async def metrics(app: FastAPI, **headers: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """The value of each sample, by its name and the values of its labels beside the model's name."""
    async with client_of(app, **headers) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    assert {family.name for family in families} >= {f"cocoa:{name}" for name in NAMES}
    found = {}
    for family in families:
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            assert sample.labels["model_name"] == "tiny"
            found[sample.name.removeprefix("cocoa:"), labels] = sample.value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_counted(stream: bool) -> None:
    engine = speaker(ends=False)
    app = create_app(engine)
    long = [{"role": "user", "content": "Say something, and say it at length. " * 4}]  # short prompts are not cached
    expected = engine.chat(long, max_new_tokens=12)
    for _ in range(2):
        assert (await post(app, {**ASKED, "messages": long, "stream": stream})).status_code == 200
    found = await metrics(app)
    usage, spans = expected.usage, expected.spans
    assert found["prompt_tokens_total", ()] == 2 * usage.prompt_tokens
    assert found["generation_tokens_total", ()] == 2 * 12
    assert found["request_success_total", ("length",)] == 2
    assert found["prefix_cache_queries_total", ()] == 2 * usage.prompt_tokens
    assert 0 < found["prefix_cache_hits_total", ()] < 2 * usage.prompt_tokens
    assert found["request_prompt_tokens_sum", ()] == 2 * usage.prompt_tokens
    assert found["request_generation_tokens_sum", ()] == 24
    assert found["spans_total", ()] == found["span_risk_count", ("token_probability",)] == 2 * len(spans)
    assert found["span_risk_sum", ("token_probability",)] == near(2 * sum(one.risk or 0 for one in spans))
    assert found["answer_max_risk_sum", ("token_probability",)] == near(2 * expected.max_risk)
    assert found["risk_points_total", ()] == 2 * usage.risk_points
    assert found["flagged_spans_total", ()] == 2 * sum(one.flagged for one in spans)
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"{name}_seconds_count", ()] == 2
    assert found["inter_token_latency_seconds_count", ()] == 2
    phases = sum(found[f"request_{name}_time_seconds_sum", ()] for name in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(found["e2e_request_latency_seconds_sum", ()])
    assert found.get(("time_to_first_token_seconds_count", ()), 0) == (2 if stream else 0)
    assert found["num_requests_running", ()] == found["num_requests_waiting", ()] == 0


async def test_load_refusals_and_clients_that_leave() -> None:
    engine = speaker(ends=False, max_batch_size=1, max_queue=1)
    app = create_app(engine)
    with gated(engine) as gate:
        running = Exchange(app, ASKED)
        await happens(lambda: gate.reached == 1)
        waiting = Exchange(app, ASKED)
        await happens(lambda: engine.session.scheduler.waiting == 1)
        assert (await post(app, ASKED)).status_code == 429
        found = await metrics(app)
        assert (found["num_requests_running", ()], found["num_requests_waiting", ()]) == (1, 1)
        assert found["rejected_total", ()] == 1
        waiting.leave()
        await waiting.ended()
        assert engine.session.scheduler.waiting == 0
        gate.open()
        await running.ended()
        assert running.status == 200
    found = await metrics(app)
    assert found["cancelled_total", ("client",)] == 1
    assert ("cancelled_total", ("shutdown",)) not in found
    assert found["request_success_total", ("length",)] == 1


@pytest.mark.slow
async def test_apps_share_neither_counts_of_answers_nor_of_scored_texts_and_need_the_key() -> None:
    engine, settings = speaker(ends=False), ServerSettings(api_keys=("secret",), served_names=("tiny", "other"))
    first, second = create_app(engine), create_app(engine, settings)
    await post(first, {"prompt": ["One", "Two"], "max_tokens": 3}, COMPLETIONS)
    await post(first, {"prompt": "One", "texts": ["Two", "Three"]}, SCORE)
    samples = await metrics(first)
    assert (samples["generation_tokens_total", ()], samples["scored_texts_total", ()]) == (6, 2)
    assert ("spans_total", ()) in samples
    assert ("spans_total", ()) not in await metrics(second, authorization="Bearer secret")
    async with client_of(second) as client:
        assert (await client.get("/metrics")).status_code == 401
    async with client_of(first, accept="application/openmetrics-text; version=1.0.0") as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_a_risk_that_is_no_number_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speaker(ends=False)
    answer: Any = engine.chat(HELLO, max_new_tokens=4)
    broken = answer.model_copy(
        update={"spans": [answer.spans[0].model_copy(update={"risk": float("nan")}), *answer.spans[1:]]}
    )
    monkeypatch.setattr(engine, "generate", lambda *_, **options: broken)
    app = create_app(engine)
    assert (await post(app, ASKED)).status_code == 200
    found = await metrics(app)
    assert found["spans_total", ()] == len(answer.spans)
    assert found.get(("span_risk_count", ("token_probability",)), 0) == len(answer.spans) - 1
    assert ("answer_max_risk_count", ("token_probability",)) not in found


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MINE: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "model": "mine", "seed": 3}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What an SDK exports; it is the global one within a test."""
    sdk = Spans()
    monkeypatch.setattr(trace, "get_tracer", sdk.provider.get_tracer)
    return sdk.exporter


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_continues_the_trace_and_has_the_answer(
    endless: Speaker, spans: InMemorySpanExporter, stream: bool
) -> None:
    expected = endless.chat(HELLO, max_new_tokens=8, seed=3)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    response = await post(create_app(endless), {**MINE, "stream": stream}, **headers)
    assert response.status_code == 200
    [span] = spans.get_finished_spans()
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert (span.name, span.kind) == ("chat tiny", SpanKind.SERVER)
    attributes = dict(span.attributes or {})
    expected_attributes = {
        "http.response.status_code": 200,
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cocoa",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": expected.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "cocoa.answers": 1,
    }
    assert {name: attributes[name] for name in expected_attributes} == expected_attributes
    assert str(attributes["gen_ai.response.id"]).startswith("chatcmpl-")
    assert attributes["cocoa.max_risk"] == near(expected.max_risk)
    assert "Say something" not in str(attributes)


async def test_spans_of_several_answers_and_of_errors_and_none_of_probes(
    endless: Speaker, spans: InMemorySpanExporter
) -> None:
    app = create_app(endless)
    async with client_of(app) as client:
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 200
    await post(app, {"prompt": "One", "n": 2, "max_tokens": 2}, COMPLETIONS)
    await post(app, {"messages": []})
    app.state.cocoa.drain()
    await post(app, MINE)
    models, several, refused, failed = [(span, dict(span.attributes or {})) for span in spans.get_finished_spans()]
    assert models[1]["url.path"] == "/v1/models"
    assert several[0].name == "text_completion tiny"
    assert several[1]["gen_ai.request.choice.count"] == several[1]["cocoa.answers"] == 2
    assert several[1]["gen_ai.response.finish_reasons"] == ("length", "length")
    assert "gen_ai.request.seed" not in several[1]
    assert (refused[1]["http.response.status_code"], failed[1]["http.response.status_code"]) == (400, 503)
    assert (refused[0].name, refused[0].status.status_code) == ("POST", StatusCode.UNSET)
    assert failed[0].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(torch.OutOfMemoryError("made up"), "out_of_memory"), (RuntimeError("broken"), "server_error")],
)
async def test_an_error_inside_a_stream_is_a_chunk_and_one_of_the_span(
    endless: Speaker, spans: InMemorySpanExporter, failure: Exception, kind: str
) -> None:
    with gated(endless) as gate:
        gate.allow(5)
        exchange = Exchange(create_app(endless), {**MINE, "max_tokens": 400, "stream": True})
        await happens(lambda: gate.reached == 6 and exchange.events)
        with failing(endless, failure):
            gate.open()
            await exchange.ended()
    assert exchange.status == 200
    assert len(exchange.events) > 2
    error = json.loads(exchange.events[-1].removeprefix("data: "))["error"]
    assert (list(error), error["code"] or error["type"]) == (["message", "type", "param", "code"], kind)
    [span] = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == kind
    assert (await chat(endless, max_tokens=2))["choices"]


async def test_no_second_span_and_none_without_opentelemetry(
    endless: Speaker, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trace.get_tracer("outer").start_as_current_span("outer"):  # another instrumentation
        await post(create_app(endless), MINE)
    [span] = spans.get_finished_spans()
    assert (span.attributes or {})["gen_ai.usage.output_tokens"] == 8
    spans.clear()
    only_others = ModuleType("opentelemetry")  # as if another package had a part of its namespace
    only_others.__path__ = []
    for name in ("opentelemetry.propagate", "opentelemetry.trace"):
        monkeypatch.delitem(sys.modules, name)
    for module in (only_others, None):
        monkeypatch.setitem(sys.modules, "opentelemetry", module)
        assert (await post(create_app(endless), MINE)).status_code == 200
        assert spans.get_finished_spans() == ()
