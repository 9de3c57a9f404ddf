"""Risk in the OpenTelemetry spans that instrumentations start for LlamaIndex calls, also of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span import SimpleSpan
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.llms import ChatMessage
from pydantic import PrivateAttr

from cocoa_engine import CocoaEngine
from cocoa_integrations.llama_index import CocoaLLM, collect_risk
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.context import Context

from tests.helpers.span_handlers import Spans, instrumented  # it needs the SDK

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def quick_llm() -> CocoaLLM:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return CocoaLLM(engine=CocoaEngine(tiny_model("llama", seed=6), tokenizer), max_new_tokens=8)


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def openinference(spans: Spans) -> Iterator[None]:
    """OpenInference's instrumentation of LlamaIndex."""
    with instrumented("openinference.instrumentation.llama_index", "LlamaIndexInstrumentor", spans):
        yield


class OTelSpan(SimpleSpan):
    """A LlamaIndex span with the OpenTelemetry span that was started for it."""

    _otel_span: Any = PrivateAttr()


class NeverCurrent(SimpleSpanHandler):
    """Starts a span for every call and does not make it current, as early versions of OpenInference's handler."""

    _spans: Spans = PrivateAttr()
    _streams: list[OTelSpan] = PrivateAttr(default_factory=list)

    def new_span(self, id_: str, bound_args: Any, instance: Any = None, *args: Any, **kwargs: Any) -> OTelSpan:
        span = OTelSpan(id_=id_)
        span._otel_span = self._spans.tracer.start_span(id_.partition("-")[0], context=Context())
        return span

    def prepare_to_exit_span(self, id_: str, bound_args: Any, *args: Any, **kwargs: Any) -> Any:
        span = self.open_spans[id_]
        if "stream" in id_:
            self._streams.append(span)  # it ends later than the call
        else:
            span._otel_span.end()
        return span


@pytest.fixture
def never_current(spans: Spans) -> Iterator[NeverCurrent]:
    handler, root = NeverCurrent(), get_dispatcher()
    handler._spans = spans
    root.add_span_handler(handler)
    yield handler
    root.span_handlers.remove(handler)


def _messages() -> list[ChatMessage]:
    return [ChatMessage(role="user", content=PROMPT)]


async def _drained(stream: Any) -> None:
    async for _ in await stream:
        pass


SYNC: dict[str, Callable[[CocoaLLM], Any]] = {
    "complete": lambda llm: llm.complete(PROMPT),
    "stream_complete": lambda llm: list(llm.stream_complete(PROMPT)),
    "chat": lambda llm: llm.chat(_messages()),
    "stream_chat": lambda llm: list(llm.stream_chat(_messages())),
}
ASYNC: dict[str, Callable[[CocoaLLM], Any]] = {
    "acomplete": lambda llm: llm.acomplete(PROMPT),
    "astream_complete": lambda llm: _drained(llm.astream_complete(PROMPT)),
    "achat": lambda llm: llm.achat(_messages()),
    "astream_chat": lambda llm: _drained(llm.astream_chat(_messages())),
}


def _risk_in(spans: Spans, name: str, reports: list[dict[str, Any]]) -> None:
    [report] = reports
    [(found, attributes)] = spans.with_risk()
    assert found == f"CocoaLLM.{name}"
    assert attributes["cocoa.answers"] == 1
    assert attributes["cocoa.max_risk"] == report["max_risk"]


@pytest.mark.parametrize("name", SYNC)
def test_under_openinference_the_span_of_the_call_gets_the_risk(
    name: str, quick_llm: CocoaLLM, spans: Spans, openinference: None
) -> None:
    with collect_risk() as reports, spans.tracer.start_as_current_span("outer"):
        SYNC[name](quick_llm)
    _risk_in(spans, name, reports)


@pytest.mark.parametrize("name", ASYNC)
async def test_under_openinference_the_span_of_the_call_gets_the_risk_of_async_calls(
    name: str, quick_llm: CocoaLLM, spans: Spans, openinference: None
) -> None:
    with collect_risk() as reports, spans.tracer.start_as_current_span("outer"):
        await ASYNC[name](quick_llm)
    _risk_in(spans, name, reports)


@pytest.mark.parametrize("name", [*SYNC, *ASYNC])
async def test_spans_that_are_never_current_get_the_risk(
    name: str, quick_llm: CocoaLLM, spans: Spans, never_current: NeverCurrent
) -> None:
    with collect_risk() as reports, spans.tracer.start_as_current_span("outer"):
        await ASYNC[name](quick_llm) if name in ASYNC else SYNC[name](quick_llm)
    for span in never_current._streams:
        span._otel_span.end()
    _risk_in(spans, name, reports)
