"""What Prometheus reads of what the server has answered, and one OpenTelemetry span for each request."""

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from cocoa_integrations.server import ServerSettings, create_app
from tests.helpers.alike import near
from tests.helpers.in_threads import happens
from tests.helpers.inside import failing, gated
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import COMPLETIONS, HELLO, SCORE, Exchange, chat, client_of, post
from tests.helpers.span_handlers import Spans

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
