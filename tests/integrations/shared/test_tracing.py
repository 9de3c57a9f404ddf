"""Risk in traces: attributes of the caller's OpenTelemetry span, whatever way an answer is asked for."""

import contextvars
import gc
import inspect
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
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
def models() -> SimpleNamespace:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = CocoaEngine(tiny_model("llama", seed=6), tokenizer)
    return SimpleNamespace(
        chat=ChatCocoa(engine=engine, max_tokens=8),
        text=CocoaLLM(engine=engine, max_tokens=8),
        index=LlamaIndexLLM(engine=engine, max_new_tokens=8),
    )


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


OF_LANGCHAIN = [
    *(("chat", method) for method in ("invoke", "stream", "batch", "ainvoke", "astream", "abatch")),
    *(("text", method) for method in ("invoke", "stream", "batch", "ainvoke", "astream", "abatch")),
]
OF_LLAMA_INDEX = [
    ("index", f"{begin}{method}") for begin in ("", "stream_", "a", "astream_") for method in ("complete", "chat")
]


async def called(models: SimpleNamespace, model: str, method: str) -> None:
    """Ask a model, and read its answer to the end."""
    asked = [PROMPT] if "batch" in method else [ChatMessage(PROMPT)] if "chat" in method else PROMPT
    made: Any = getattr(getattr(models, model), method)(asked)
    made = await made if inspect.isawaitable(made) else made
    if isinstance(made, AsyncIterator):
        _ = [chunk async for chunk in made]
    elif isinstance(made, Iterator):
        _ = list(made)


@pytest.mark.parametrize("is_instrumented", [False, True])
@pytest.mark.parametrize(("model", "method"), OF_LANGCHAIN + OF_LLAMA_INDEX)
async def test_the_span_that_is_current_gets_the_risk(
    model: str, method: str, is_instrumented: bool, models: SimpleNamespace, tracer: Tracer
) -> None:
    """That of LlamaIndex's instrumentation, even where a stream is read later; those of LangChain's never are."""
    package, name = ("llama_index", "LlamaIndex") if model == "index" else ("langchain", "LangChain")
    instrumentor = (f"openinference.instrumentation.{package}", f"{name}Instrumentor", tracer)
    with (
        instrumented(*instrumentor) if is_instrumented else nullcontext(),
        get_risk_callback() as risk,
        collect_risk() as reports,
        tracer.span("call"),
    ):
        await called(models, model, method)
    [report] = risk.reports + reports
    [(name, attributes)] = tracer.with_risk()
    assert name.startswith("CocoaLLM.") if model == "index" and is_instrumented else name == "call"
    assert attributes == expected_of(report)


def test_answers_under_one_span_are_summed_up(models: SimpleNamespace, tracer: Tracer) -> None:
    with get_risk_callback() as risk, collect_risk() as reports, tracer.span("call"):
        models.chat.batch(["a", "b", "c"])  # in threads
        models.text.batch(["a", "b"])
        models.index.complete("a")
    reports = [*risk.reports, *reports]
    assert len(reports) == 6
    assert tracer.attributes() == expected_of(*reports)


@pytest.mark.parametrize(("model", "method"), [("chat", "stream"), ("index", "stream_complete")])
def test_a_stream_belongs_to_the_span_in_which_it_began(
    model: str, method: str, models: SimpleNamespace, tracer: Tracer
) -> None:
    with get_risk_callback() as risk, collect_risk() as reports, tracer.span("call"):
        stream = iter(getattr(getattr(models, model), method)("a"))
        next(stream)
        with tracer.span("reader"):
            contextvars.Context().run(lambda: list(stream))  # where nothing is known of either span
    [report] = risk.reports + reports
    assert tracer.attributes() == expected_of(report)
    assert tracer.attributes("reader") == {}


def test_a_span_that_has_ended_and_a_broken_stream_get_nothing(models: SimpleNamespace, tracer: Tracer) -> None:
    chat = models.chat
    with tracer.span("ended"):
        late = iter(chat.stream("a"))
        next(late)
    list(late)
    with tracer.span("broken"):
        next(chat.stream("a"))
        next(models.index.stream_complete("a"))
        with pytest.raises(Exception, match="empty"):
            chat.invoke("")
    assert tracer.attributes("ended") == tracer.attributes("broken") == {}


@pytest.mark.slow
def test_without_a_span_nothing_happens_and_nothing_is_kept(models: SimpleNamespace, tracer: Tracer) -> None:
    chat = models.chat
    assert not trace.get_current_span().is_recording()
    gc.collect()
    before = len(tracing._totals)  # of spans that other tests have left
    chat.invoke("a")
    with tracer.span("call"):
        chat.invoke("a")
    tracer.exporter.clear()
    gc.collect()
    assert len(tracing._totals) <= before  # spans that are gone leave nothing


def test_opentelemetry_is_not_needed(models: SimpleNamespace, tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracer.span("call"):
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        monkeypatch.setitem(sys.modules, "opentelemetry", None)  # as if it were not installed
        models.chat.invoke("a")
        list(models.chat.stream("a"))
        models.index.complete("a")
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
