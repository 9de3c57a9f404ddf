"""Risk as LangSmith feedback, and as OpenTelemetry evaluation events."""

from __future__ import annotations

import threading
import uuid
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import LangChainTracer
from langsmith import Client, traceable, tracing_context

from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, RiskScores, max_risk
from tests.helpers.alike import near
from tests.helpers.span_handlers import Events, Spans

pytest.importorskip("opentelemetry.sdk")


pytestmark = pytest.mark.also_remote

PROJECT = uuid.uuid4()


class Recorder(Client):
    """A client of LangSmith that keeps the feedback instead of sending it."""

    def __init__(self) -> None:
        super().__init__(api_url="http://127.0.0.1:9", api_key="none", auto_batch_tracing=False)
        self.feedback: list[dict[str, Any]] = []

    def create_feedback(self, **feedback: Any) -> Any:
        signature(Client.create_feedback).bind(self, **feedback)
        self.feedback.append(feedback)

    def read_project(self, **kwargs: Any) -> Any:
        return SimpleNamespace(id=PROJECT)

    def create_run(self, *args: Any, **kwargs: Any) -> None: ...

    def update_run(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.fixture
def client() -> Recorder:
    return Recorder()


@pytest.fixture
def events() -> Events:
    return Events()


def test_langsmith_gets_feedback_on_every_run(quick_chat: ChatCocoa, client: Recorder) -> None:
    scores, run_id = RiskScores(client=client, threshold=0.0), uuid.uuid4()
    answer = quick_chat.invoke("a", {"run_id": run_id, "callbacks": [scores]}, max_tokens=4)
    scores.flush()
    [feedback] = client.feedback
    assert feedback["key"] == "hallucination_risk"
    assert feedback["score"] == near(max_risk(answer))
    assert feedback["run_id"] == feedback["trace_id"] == run_id
    assert feedback["session_id"] == PROJECT
    assert feedback["value"] == "fail"
    assert "how unsure the model was" in feedback["comment"]
    assert feedback["source_info"]["model"] == "quick"


async def test_feedback_in_a_chain_names_the_trace(
    quick_chat: ChatCocoa, quick_llm: CocoaLLM, client: Recorder
) -> None:
    scores, run_id = RiskScores(client=client), uuid.uuid4()
    callbacks = [LangChainTracer(client=client), scores]
    chain = RunnableLambda(str) | quick_chat | RunnableLambda(lambda message: message.text) | quick_llm
    chain.invoke("a", {"run_id": run_id, "callbacks": callbacks})
    await chain.ainvoke("a", {"run_id": run_id, "callbacks": callbacks})
    list(chain.stream("a", {"run_id": run_id, "callbacks": callbacks}))
    async for _ in chain.astream("a", {"run_id": run_id, "callbacks": callbacks}):
        pass
    list(quick_chat.stream("a", {"callbacks": callbacks}))
    scores.flush()
    *of_chains, alone = client.feedback
    assert [feedback["trace_id"] for feedback in of_chains] == [run_id] * 8
    assert len({run_id, *(feedback["run_id"] for feedback in of_chains)}) == 9
    assert alone["trace_id"] == alone["run_id"]


def test_a_run_inside_a_retriever_is_in_its_trace(quick_llm: CocoaLLM, client: Recorder) -> None:
    class Rewrites(BaseRetriever):
        """Asks a model before it searches."""

        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            return [Document(quick_llm.invoke(query, {"callbacks": run_manager.get_child()}, max_tokens=1))]

    scores, run_id = RiskScores(client=client), uuid.uuid4()
    callbacks = [LangChainTracer(client=client), scores]
    (RunnableLambda(str) | Rewrites()).invoke("a", {"run_id": run_id, "callbacks": callbacks})
    scores.flush()
    [feedback] = client.feedback
    assert feedback["trace_id"] == run_id != feedback["run_id"]


def test_feedback_inside_a_traced_function_names_its_trace(quick_chat: ChatCocoa, client: Recorder) -> None:
    scores, run_id = RiskScores(client=client), uuid.uuid4()

    @traceable
    def ask() -> None:
        quick_chat.invoke("a", {"run_id": run_id, "callbacks": [scores]}, max_tokens=1)

    root = uuid.uuid4()
    with tracing_context(enabled=True, client=client):
        ask(langsmith_extra={"run_id": root, "client": client})
    scores.flush()
    [feedback] = client.feedback
    assert (feedback["run_id"], feedback["trace_id"]) == (run_id, root)


def test_without_a_langsmith_trace_feedback_names_the_run_alone(quick_chat: ChatCocoa, client: Recorder) -> None:
    scores = RiskScores(client=client)
    (RunnableLambda(str) | quick_chat).invoke("a", {"callbacks": [scores]})
    scores.flush()
    [feedback] = client.feedback
    assert feedback["run_id"]
    assert feedback["trace_id"] is None


def test_more_feedback_than_can_wait_is_dropped(
    quick_chat: ChatCocoa, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_send = threading.Event()

    class Slow(Recorder):
        def create_feedback(self, **feedback: Any) -> Any:
            may_send.wait(60)
            super().create_feedback(**feedback)

    monkeypatch.setattr("cocoa_integrations.langchain.callbacks._MAX_WAITING", 2)
    scores = RiskScores(client=(client := Slow()))
    for _ in range(3):
        quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    may_send.set()
    scores.flush()
    assert len(client.feedback) == 2
    assert "2 others wait to be sent" in caplog.text
    quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    scores.flush()
    assert len(client.feedback) == 3


def test_a_server_that_fails_does_not_fail_the_call(quick_chat: ChatCocoa, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def create_feedback(self, **feedback: Any) -> Any:
            raise RuntimeError("no server\x1b[31m" + "x" * 10**6)

        def read_project(self, **kwargs: Any) -> Any:
            raise RuntimeError("no server")

    scores = RiskScores(client=Broken())
    assert quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1).text
    scores.flush()
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "no server␛[31m" in record.getMessage()
    assert len(record.getMessage()) < 1000


@pytest.mark.parametrize("streamed", [False, True])
def test_opentelemetry_gets_an_event_in_the_current_span(quick_chat: ChatCocoa, events: Events, streamed: bool) -> None:
    config: Any = {"callbacks": [RiskScores(logger_provider=events.provider, threshold=1.0)]}
    with Spans().tracer.start_as_current_span("call") as span:
        if streamed:
            *_, answer = quick_chat.stream("a", config, max_tokens=4)
        else:
            answer = quick_chat.invoke("a", config, max_tokens=4)
    [event] = events.records()
    assert event.event_name == "gen_ai.evaluation.result"
    attributes = dict(event.attributes)
    assert attributes.pop("gen_ai.evaluation.explanation").startswith(
        "highest risk of any span (how unsure the model was)"
    )
    assert attributes == {
        "gen_ai.evaluation.name": "hallucination_risk",
        "gen_ai.evaluation.score.value": max_risk(answer),
        "gen_ai.evaluation.score.label": "pass",
        "gen_ai.response.id": answer.id,
        "gen_ai.response.model": "quick",
    }
    context = span.get_span_context()
    assert (event.trace_id, event.span_id) == (context.trace_id, context.span_id)


def test_an_interrupted_answer_has_no_score(quick_chat: ChatCocoa, events: Events) -> None:
    scores = RiskScores(logger_provider=events.provider)
    stream = quick_chat.stream("a", {"callbacks": [scores]})
    next(stream)
    stream.close()
    assert events.records() == []


@pytest.mark.parametrize("options", [{"name": ""}, {"threshold": float("nan")}])
def test_invalid_options_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        RiskScores(**options)


async def test_an_event_of_an_async_call_of_a_text_model(quick_llm: CocoaLLM, events: Events) -> None:
    spans = Spans()
    config: Any = {"callbacks": [RiskScores(logger_provider=events.provider, explain=False, name="risk")]}
    with spans.tracer.start_as_current_span("outer") as outer:
        await quick_llm.ainvoke("a", config)
    [event] = events.records()
    assert event.span_id == outer.get_span_context().span_id
    assert event.attributes["gen_ai.evaluation.name"] == "risk"
    explanation = event.attributes["gen_ai.evaluation.explanation"]
    assert explanation == "highest risk of any span (how unsure the model was)"
    assert "gen_ai.evaluation.score.label" not in event.attributes


def test_without_langsmith_nothing_is_sent(quick_chat: ChatCocoa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setattr(Client, "create_feedback", lambda *args, **kwargs: pytest.fail("was sent"))
    scores = RiskScores()
    quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    scores.flush()
