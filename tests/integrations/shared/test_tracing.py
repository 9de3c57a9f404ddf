"""Risk in traces: attributes of the caller's OpenTelemetry span, whatever way an answer is asked for."""

from __future__ import annotations

import contextvars
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from llama_index.core.llms import ChatMessage
from opentelemetry import trace

from cocoa_engine import CocoaEngine
from cocoa_engine.report import RiskReport
from cocoa_integrations import tracing
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, get_risk, get_risk_callback
from cocoa_integrations.llama_index import CocoaLLM as LlamaIndexLLM
from cocoa_integrations.llama_index import collect_risk
from tests.helpers.alike import near
from tests.helpers.reasoning_models import reasoning_engine, saying
from tests.helpers.span_handlers import Spans, instrumented
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return CocoaEngine(tiny_model("llama", seed=6), tokenizer)


@pytest.fixture(scope="module")
def chat(engine: CocoaEngine) -> ChatCocoa:
    return ChatCocoa(engine=engine, max_tokens=8)


@pytest.fixture(scope="module")
def text_model(engine: CocoaEngine) -> CocoaLLM:
    return CocoaLLM(engine=engine, max_tokens=8)


@pytest.fixture(scope="module")
def index_llm(engine: CocoaEngine) -> LlamaIndexLLM:
    return LlamaIndexLLM(engine=engine, max_new_tokens=8)


class Tracer(Spans):
    """An SDK of its own, whose spans end in memory."""

    def span(self, name: str) -> Any:
        """A span that is current inside a ``with`` block."""
        return self.tracer.start_as_current_span(name)

    def attributes(self, name: str = "call") -> dict[str, Any]:
        """Of the one span of that name."""
        [span] = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return dict(span.attributes or {})


@pytest.fixture
def tracer() -> Tracer:
    return Tracer()


def expected_of(*reports: RiskReport) -> dict[str, Any]:
    """The attributes of a span under which these answers were given."""
    risks = [span.risk or 0.0 for report in reports for span in report.spans]
    return {
        "cocoa.max_risk": max(risks),
        "cocoa.mean_risk": pytest.approx(sum(risks) / len(risks)),
        "cocoa.risk_points": sum(report.risk_points for report in reports),
        "cocoa.calibrated": False,
        "cocoa.answers": len(reports),
    }


# One call, in every way there is.


def _messages() -> list[ChatMessage]:
    return [ChatMessage(role="user", content=PROMPT)]


SYNC: dict[str, Callable[[Any, Any, Any], Any]] = {
    "chat.invoke": lambda chat, text, index: chat.invoke(PROMPT),
    "chat.invoke streaming": lambda chat, text, index: chat.invoke(PROMPT, stream=True),
    "chat.stream": lambda chat, text, index: list(chat.stream(PROMPT)),
    "chat.batch": lambda chat, text, index: chat.batch([PROMPT]),
    "chain.invoke": lambda chat, text, index: (RunnableLambda(str) | chat).invoke(PROMPT),
    "chain.stream": lambda chat, text, index: list((chat | RunnableLambda(str)).stream(PROMPT)),
    "llm.invoke": lambda chat, text, index: text.invoke(PROMPT),
    "llm.stream": lambda chat, text, index: list(text.stream(PROMPT)),
    "llm.with_risk": lambda chat, text, index: text.with_risk().invoke(PROMPT),
    "index.complete": lambda chat, text, index: index.complete(PROMPT),
    "index.stream_complete": lambda chat, text, index: list(index.stream_complete(PROMPT)),
    "index.chat": lambda chat, text, index: index.chat(_messages()),
    "index.stream_chat": lambda chat, text, index: list(index.stream_chat(_messages())),
}


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def _drained_later(stream: Any) -> None:
    await _drained(await stream)


ASYNC: dict[str, Callable[[Any, Any, Any], Any]] = {
    "chat.ainvoke": lambda chat, text, index: chat.ainvoke(PROMPT),
    "chat.astream": lambda chat, text, index: _drained(chat.astream(PROMPT)),
    "chat.abatch": lambda chat, text, index: chat.abatch([PROMPT]),
    "chat.astream_events": lambda chat, text, index: _drained(chat.astream_events(PROMPT, version="v2")),
    "chain.astream": lambda chat, text, index: _drained((chat | RunnableLambda(str)).astream(PROMPT)),
    "llm.ainvoke": lambda chat, text, index: text.ainvoke(PROMPT),
    "llm.astream": lambda chat, text, index: _drained(text.astream(PROMPT)),
    "index.acomplete": lambda chat, text, index: index.acomplete(PROMPT),
    "index.astream_complete": lambda chat, text, index: _drained_later(index.astream_complete(PROMPT)),
    "index.achat": lambda chat, text, index: index.achat(_messages()),
    "index.astream_chat": lambda chat, text, index: _drained_later(index.astream_chat(_messages())),
}


CALLS = {**SYNC, **ASYNC}


async def _called(call: Any, *models: Any) -> None:
    made = call(*models)
    if inspect.isawaitable(made):
        await made


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_the_callers_span_gets_the_risk(
    call: Any, chat: Any, text_model: Any, index_llm: Any, tracer: Tracer
) -> None:
    with get_risk_callback() as risk, collect_risk() as reports, tracer.span("call"):
        await _called(call, chat, text_model, index_llm)
    [report] = risk.reports + reports
    assert tracer.attributes() == expected_of(report)


# Several, and none.


def test_answers_under_one_span_are_summed_up(
    chat: ChatCocoa, text_model: CocoaLLM, index_llm: LlamaIndexLLM, tracer: Tracer
) -> None:
    with get_risk_callback() as risk, collect_risk() as reports, tracer.span("call"):
        chat.batch(["a", "b", "c"])  # in threads
        text_model.batch(["a", "b"])
        index_llm.complete("a")
    reports = [*risk.reports, *reports]
    assert len(reports) == 6
    assert tracer.attributes() == expected_of(*reports)


@pytest.mark.parametrize("framework", ["langchain", "llama_index"])
def test_a_stream_belongs_to_the_span_in_which_it_began(
    chat: ChatCocoa, index_llm: LlamaIndexLLM, tracer: Tracer, framework: str
) -> None:
    with get_risk_callback() as risk, collect_risk() as reports, tracer.span("call"):
        stream: Iterator[Any] = iter(chat.stream("a") if framework == "langchain" else index_llm.stream_complete("a"))
        next(stream)
        with tracer.span("reader"):
            contextvars.Context().run(lambda: list(stream))  # where nothing is known of either span
    [report] = risk.reports + reports
    assert tracer.attributes() == expected_of(report)
    assert tracer.attributes("reader") == {}


LANGCHAIN = {name: call for name, call in CALLS.items() if not name.startswith("index")}
LLAMA_INDEX = {name: call for name, call in CALLS.items() if name.startswith("index")}


@pytest.mark.parametrize("call", LLAMA_INDEX.values(), ids=LLAMA_INDEX)
async def test_an_instrumentation_whose_span_is_current_has_it(
    call: Any, chat: ChatCocoa, text_model: CocoaLLM, index_llm: LlamaIndexLLM, tracer: Tracer
) -> None:
    """A stream is read when the instrumentation's span is no longer current."""
    instrumentation = instrumented("openinference.instrumentation.llama_index", "LlamaIndexInstrumentor", tracer)
    with instrumentation, collect_risk() as reports, tracer.span("call"):
        await _called(call, chat, text_model, index_llm)
    [(name, attributes)] = tracer.with_risk()
    assert name.startswith("CocoaLLM.")
    assert attributes == expected_of(*reports)


@pytest.mark.parametrize("call", LANGCHAIN.values(), ids=LANGCHAIN)
async def test_beside_an_instrumentation_whose_spans_are_not_current_the_callers_span_has_it(
    call: Any, chat: ChatCocoa, text_model: CocoaLLM, index_llm: LlamaIndexLLM, tracer: Tracer
) -> None:
    instrumentation = instrumented("openinference.instrumentation.langchain", "LangChainInstrumentor", tracer)
    with instrumentation, get_risk_callback() as risk, tracer.span("call"):
        await _called(call, chat, text_model, index_llm)
    assert tracer.with_risk() == [("call", expected_of(*risk.reports))]


def test_a_span_that_has_ended_and_a_broken_stream_get_nothing(
    chat: ChatCocoa, index_llm: LlamaIndexLLM, tracer: Tracer
) -> None:
    with tracer.span("ended"):
        late = iter(chat.stream("a"))
        next(late)
    list(late)
    with tracer.span("broken"):
        next(chat.stream("a"))
        next(index_llm.stream_complete("a"))
        with pytest.raises(Exception, match="empty"):
            chat.invoke("")
    assert tracer.attributes("ended") == tracer.attributes("broken") == {}


def test_without_a_span_nothing_happens_and_nothing_is_kept(chat: ChatCocoa, tracer: Tracer) -> None:
    assert not trace.get_current_span().is_recording()
    gc.collect()
    before = len(tracing._totals)  # of spans that other tests have left
    chat.invoke("a")
    with tracer.span("call"):
        chat.invoke("a")
    tracer.exporter.clear()
    gc.collect()
    assert len(tracing._totals) <= before  # spans that are gone leave nothing


def test_opentelemetry_is_not_needed(
    chat: ChatCocoa, index_llm: LlamaIndexLLM, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracer.span("call"):
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        monkeypatch.setitem(sys.modules, "opentelemetry", None)  # as if it were not installed
        chat.invoke("a")
        list(chat.stream("a"))
        index_llm.complete("a")
        monkeypatch.undo()
    assert tracer.attributes() == {}


def test_the_risk_of_reasoning_does_not_count(tracer: Tracer) -> None:
    thinker = reasoning_engine()
    options = saying(thinker, "Well, well.</think>\n\nHello!")
    chat, llm = ChatCocoa(engine=thinker), LlamaIndexLLM(engine=thinker)
    expected = get_risk(chat.invoke(PROMPT, **options)).to_dict()
    of_all = [span["risk"] for span in expected["spans"]]
    assert expected["mean_risk"] != pytest.approx(sum(of_all) / len(of_all), rel=1e-3)
    with tracer.span("invoked"):
        chat.invoke(PROMPT, **options)
    with tracer.span("streamed"):
        list(chat.stream(PROMPT, **options))
    with tracer.span("llama"):
        llm.chat([ChatMessage(content=PROMPT)], **options)
    for name in ("invoked", "streamed", "llama"):
        attributes = tracer.attributes(name)
        assert attributes["cocoa.max_risk"] == near(expected["max_risk"])
        assert attributes["cocoa.mean_risk"] == near(expected["mean_risk"])
