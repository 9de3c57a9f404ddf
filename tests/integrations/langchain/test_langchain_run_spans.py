"""Risk in the OpenTelemetry spans of runs, which instrumentations start in callbacks without making them current."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk_callback

pytest.importorskip("opentelemetry.sdk")

from tests.helpers.span_handlers import AzureLike, Spans, instrumented  # it needs the SDK

PROMPT = "Who invented the telephone?"
Config = dict[str, Any]


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


SYNC: dict[str, Callable[[ChatCocoa, CocoaLLM, Any], Any]] = {
    "chat.invoke": lambda chat, llm, config: chat.invoke(PROMPT, config),
    "chat.invoke streaming": lambda chat, llm, config: chat.invoke(PROMPT, config, stream=True),
    "chat.stream": lambda chat, llm, config: list(chat.stream(PROMPT, config)),
    "chat.stream with an option": lambda chat, llm, config: list(chat.stream(PROMPT, config, alpha=1.0, stop=["!"])),
    "chat.bind.stream": lambda chat, llm, config: list(chat.bind(alpha=1.0).stream(PROMPT, config)),
    "chat.batch": lambda chat, llm, config: chat.batch([PROMPT], config),
    "chat.stream_events v3": lambda chat, llm, config: list(chat.stream_events(PROMPT, config, version="v3")),
    "chain.invoke": lambda chat, llm, config: (RunnableLambda(str) | chat).invoke(PROMPT, config),
    "chain.stream": lambda chat, llm, config: list((chat | RunnableLambda(str)).stream(PROMPT, config)),
    "llm.invoke": lambda chat, llm, config: llm.invoke(PROMPT, config),
    "llm.invoke streaming": lambda chat, llm, config: llm.invoke(PROMPT, config, stream=True),
    "llm.stream": lambda chat, llm, config: list(llm.stream(PROMPT, config)),
    "llm.with_risk": lambda chat, llm, config: llm.with_risk().invoke(PROMPT, config),
}
ASYNC: dict[str, Callable[[ChatCocoa, CocoaLLM, Any], Any]] = {
    "chat.ainvoke": lambda chat, llm, config: chat.ainvoke(PROMPT, config),
    "chat.ainvoke streaming": lambda chat, llm, config: chat.ainvoke(PROMPT, config, stream=True),
    "chat.astream": lambda chat, llm, config: _drained(chat.astream(PROMPT, config)),
    "chat.astream_events": lambda chat, llm, config: _drained(chat.astream_events(PROMPT, config, version="v2")),
    "chain.astream": lambda chat, llm, config: _drained((chat | RunnableLambda(str)).astream(PROMPT, config)),
    "llm.ainvoke": lambda chat, llm, config: llm.ainvoke(PROMPT, config),
    "llm.astream": lambda chat, llm, config: _drained(llm.astream(PROMPT, config)),
}


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def openinference(spans: Spans) -> Iterator[None]:
    """OpenInference's instrumentation of LangChain."""
    with instrumented("openinference.instrumentation.langchain", "LangChainInstrumentor", spans):
        yield


def _risk_in(spans: Spans, risk: Any) -> None:
    [report] = risk.reports
    [(name, attributes)] = spans.with_risk()
    assert name in ("ChatCocoa", "CocoaLLM", "model")
    assert attributes["cocoa.answers"] == 1
    assert attributes["cocoa.max_risk"] == report["max_risk"]


@pytest.mark.parametrize("call", SYNC.values(), ids=SYNC)
def test_under_openinference_the_span_of_the_run_gets_the_risk(
    call: Any, quick_chat: ChatCocoa, quick_llm: CocoaLLM, spans: Spans, openinference: None
) -> None:
    with get_risk_callback() as risk, spans.tracer.start_as_current_span("outer"):
        call(quick_chat, quick_llm, None)
    _risk_in(spans, risk)


@pytest.mark.parametrize("call", ASYNC.values(), ids=ASYNC)
async def test_under_openinference_the_span_of_the_run_gets_the_risk_of_async_calls(
    call: Any, quick_chat: ChatCocoa, quick_llm: CocoaLLM, spans: Spans, openinference: None
) -> None:
    with get_risk_callback() as risk, spans.tracer.start_as_current_span("outer"):
        await call(quick_chat, quick_llm, None)
    _risk_in(spans, risk)


@pytest.mark.parametrize("call", SYNC.values(), ids=SYNC)
def test_a_handler_that_starts_spans_gets_the_risk(
    call: Any, quick_chat: ChatCocoa, quick_llm: CocoaLLM, spans: Spans
) -> None:
    with get_risk_callback() as risk:  # no span is current
        call(quick_chat, quick_llm, {"callbacks": [AzureLike(spans.tracer)]})
    _risk_in(spans, risk)


@pytest.mark.parametrize("call", ASYNC.values(), ids=ASYNC)
async def test_a_handler_that_starts_spans_gets_the_risk_of_async_calls(
    call: Any, quick_chat: ChatCocoa, quick_llm: CocoaLLM, spans: Spans
) -> None:
    with get_risk_callback() as risk:
        await call(quick_chat, quick_llm, {"callbacks": [AzureLike(spans.tracer)]})
    _risk_in(spans, risk)


def test_a_handler_of_the_model_itself_gets_the_risk(quick_chat: ChatCocoa, spans: Spans) -> None:
    chat = quick_chat.model_copy(update={"callbacks": [AzureLike(spans.tracer)]})
    list(chat.stream(PROMPT))
    chat.invoke(PROMPT)
    assert [name for name, _ in spans.with_risk()] == ["model", "model"]


@pytest.mark.parametrize("kind", ["quick_chat", "quick_llm"])
async def test_each_answer_of_a_batch_has_the_span_of_its_run(
    request: pytest.FixtureRequest, kind: str, spans: Spans
) -> None:
    model = request.getfixturevalue(kind)
    config = {"callbacks": [AzureLike(spans.tracer)]}
    with get_risk_callback() as risk:
        model.batch(["a", "b", "c"], config)
        await model.abatch(["d", "e"], config)
    attributes = [attributes for _, attributes in spans.with_risk()]
    assert [one["cocoa.answers"] for one in attributes] == [1] * 5
    expected = sorted(report["max_risk"] for report in risk.reports)
    assert sorted(one["cocoa.max_risk"] for one in attributes) == expected


def test_the_run_id_of_the_caller_is_kept(quick_chat: ChatCocoa, spans: Spans) -> None:
    from uuid import uuid4

    run_id = uuid4()
    chunks = list(quick_chat.stream(PROMPT, {"run_id": run_id, "callbacks": [AzureLike(spans.tracer)]}))
    assert chunks[0].id == f"lc_run--{run_id}"
    assert len(spans.with_risk()) == 1


def test_a_handler_with_other_attributes_of_these_names_changes_nothing(quick_chat: ChatCocoa, spans: Spans) -> None:
    class Counting(AzureLike):
        def get_span(self) -> None:
            """Takes no run."""

        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None: ...

        def on_llm_end(self, response: Any, **kwargs: Any) -> None: ...

    handler = Counting(spans.tracer)
    handler._spans = {"text": "not spans"}  # type: ignore[dict-item]
    with spans.tracer.start_as_current_span("outer"):
        quick_chat.invoke(PROMPT, {"callbacks": [handler]})
    assert [name for name, _ in spans.with_risk()] == ["outer"]
