"""One OpenTelemetry span for each request, which continues the client's trace and has the answer's attributes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cocoa_integrations.server import create_app
from tests.helpers.alike import near
from tests.helpers.forward_passes import failing
from tests.helpers.served import HELLO, Exchange, Speaker, client_of, gated, happens, post, speaker

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "model": "mine", "seed": 3}


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker(ends=False)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What an SDK exports; it is the global one within a test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda *names: provider.get_tracer(*names))
    yield exporter
    provider.shutdown()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_continues_the_trace_and_has_the_answer(
    tiny: Speaker, spans: InMemorySpanExporter, stream: bool
) -> None:
    expected = tiny.chat(HELLO, max_new_tokens=8, seed=3)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    response = await post(create_app(tiny), {**ASKED, "stream": stream}, **headers)
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


async def test_completions_with_several_answers(tiny: Speaker, spans: InMemorySpanExporter) -> None:
    await post(create_app(tiny), {"prompt": "One", "n": 2, "max_tokens": 2}, "/v1/completions")
    [span] = spans.get_finished_spans()
    found = dict(span.attributes or {})
    assert span.name == "text_completion tiny"
    assert found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["cocoa.answers"] == 2
    assert "gen_ai.request.seed" not in found


async def test_errors_have_their_status(tiny: Speaker, spans: InMemorySpanExporter) -> None:
    app = create_app(tiny)
    await post(app, {"messages": []})
    app.state.cocoa.drain()
    await post(app, ASKED)
    refused, failed = spans.get_finished_spans()
    assert (refused.attributes or {})["http.response.status_code"] == 400
    assert (refused.name, refused.status.status_code) == ("POST", StatusCode.UNSET)
    assert (failed.attributes or {})["http.response.status_code"] == 503
    assert failed.status.status_code is StatusCode.ERROR


async def test_an_error_inside_a_stream_is_one_of_the_span(tiny: Speaker, spans: InMemorySpanExporter) -> None:
    with gated(tiny) as gate:
        gate.allow(5)
        exchange = Exchange(create_app(tiny), {**ASKED, "max_tokens": 400, "stream": True})
        await happens(lambda: gate.reached == 6 and exchange.events)
        with failing(tiny, RuntimeError("broken")):
            gate.open()
            await exchange.ended()
    assert '"error"' in exchange.body.decode()
    [span] = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "server_error"


async def test_probes_have_no_spans_and_others_do(tiny: Speaker, spans: InMemorySpanExporter) -> None:
    async with client_of(create_app(tiny)) as client:
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 200
    assert [(span.attributes or {})["url.path"] for span in spans.get_finished_spans()] == ["/v1/models"]


async def test_no_second_span_and_none_without_opentelemetry(
    tiny: Speaker, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trace.get_tracer("outer").start_as_current_span("outer"):  # another instrumentation
        await post(create_app(tiny), ASKED)
    [span] = spans.get_finished_spans()
    assert (span.attributes or {})["gen_ai.usage.output_tokens"] == 8
    spans.clear()
    only_others = ModuleType("opentelemetry")  # as if another package had a part of its namespace
    only_others.__path__ = []
    for name in ("opentelemetry.propagate", "opentelemetry.trace"):
        monkeypatch.delitem(sys.modules, name)
    for module in (only_others, None):
        monkeypatch.setitem(sys.modules, "opentelemetry", module)
        assert (await post(create_app(tiny), ASKED)).status_code == 200
        assert spans.get_finished_spans() == ()
