"""Handlers: risk of every answer once, whatever way it was asked for; LangSmith feedback, OpenTelemetry events."""

import asyncio
import contextvars
import threading
import uuid
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import LangChainTracer
from langsmith import Client, traceable, tracing_context

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    RiskCallbackHandler,
    RiskScores,
    get_risk,
    get_risk_callback,
    get_spans,
    max_risk,
)
from tests.helpers.alike import near, without_run
from tests.helpers.in_threads import join, start
from tests.helpers.inside import failing
from tests.helpers.span_handlers import Events, Spans
from tests.helpers.tiny_models import QUESTION

pytestmark = pytest.mark.also_remote

PROJECT = uuid.uuid4()


async def test_it_collects_batches_async_calls_chains_and_other_threads(
    quick_chat: ChatCocoa, quick_llm: CocoaLLM
) -> None:
    chain = RunnableLambda(lambda text: quick_chat.invoke(text, max_tokens=4)) | (lambda message: message.content)
    with get_risk_callback() as risk:
        quick_llm.batch(["a", "b", "c"], max_tokens=4)
    [a, b, c] = quick_llm.generate(["a", "b", "c"], max_tokens=4).generations
    assert without_run(risk.reports) == [get_risk(one[0]).to_dict() for one in (a, b, c)]
    with get_risk_callback() as risk:
        quick_chat.batch(["a", "b", "c"], max_tokens=4)  # in threads
        assert len(risk.reports) == 3
        chain.batch(["a", "b"])
        copied = contextvars.copy_context()
        join([start(lambda: copied.run(chain.invoke, "c"))])
        assert len(risk.reports) == 6
        await asyncio.gather(quick_chat.ainvoke("a", max_tokens=4), quick_chat.abatch(["b", "c"], max_tokens=4))
        await quick_llm.abatch(["a", "b"], max_tokens=4)
        for model in (quick_chat, quick_llm):
            _ = [chunk async for chunk in model.astream("d", max_tokens=4)]
    assert len(risk.reports) == 13
    assert not any("partial" in report for report in risk.reports)


async def test_a_stream_left_early_leaves_a_partial_report(
    quick_chat: ChatCocoa, quick_llm: CocoaLLM, quick_answer: AIMessage
) -> None:
    with get_risk_callback() as risk:
        for number, _ in enumerate(quick_chat.stream(QUESTION)):
            if number == 1:
                break
        for _ in quick_llm.stream("Once"):
            break
        stream = quick_chat.astream(QUESTION)
        await anext(stream)
        await stream.aclose()
    chat_report, llm_report, of_async = risk.reports
    assert of_async.partial is True
    assert chat_report.partial is True
    assert chat_report.spans == get_spans(quick_answer)[:2]
    assert chat_report.max_risk == max(span.risk or 0.0 for span in chat_report.spans)
    assert set(chat_report.to_dict()) == {*get_risk(quick_answer).to_dict(), "partial", "run_id"} - {
        *("model_name", "check", "claims", "sentences", "source_heads")
    }
    assert len(llm_report.spans) == 1
    assert risk.max_risk == max(report.max_risk for report in risk.reports)


@pytest.mark.also_remote(False)
def test_an_error_in_mid_stream_leaves_a_partial_report(quick_engine: CocoaEngine, quick_chat: ChatCocoa) -> None:
    with get_risk_callback() as risk:
        stream = quick_chat.stream(QUESTION)
        next(stream)
        with failing(quick_engine, RuntimeError("broken")):
            with pytest.raises(RuntimeError, match="broken"):
                list(stream)
            with pytest.raises(RuntimeError, match="broken"):
                quick_chat.invoke(QUESTION)  # nothing was decided: nothing to report
    [report] = risk.reports
    assert len(report.spans) == 1


def test_an_outer_block_sees_what_an_inner_one_sees_once(quick_chat: ChatCocoa) -> None:
    def asks_inside(text: str) -> str:
        with get_risk_callback() as inner:
            quick_chat.invoke(text, max_tokens=4)
        assert len(inner.reports) == 1
        return text

    with get_risk_callback() as outer:
        asks_inside("a")
        RunnableLambda(asks_inside).invoke("b")  # here the outer handler is attached to the chain as well
        quick_chat.invoke("c", max_tokens=4)
    assert len(outer.reports) == 3


def test_a_block_ends_after_an_error_in_another_context_and_in_any_order(quick_chat: ChatCocoa) -> None:
    def ask() -> None:
        quick_chat.invoke("a", max_tokens=1)

    with pytest.raises(KeyError), get_risk_callback() as risk:
        raise KeyError
    ask()
    assert risk.reports == []
    for enters, leaves in ((contextvars.copy_context().run, _here), (_here, contextvars.copy_context().run)):
        block = get_risk_callback()
        risk = enters(block.__enter__)
        enters(ask)
        leaves(block.__exit__, None, None, None)
        assert len(risk.reports) == 1
        with get_risk_callback() as after:  # nothing is left in disorder
            ask()
        assert len(after.reports) == 1
    first, second = get_risk_callback(), get_risk_callback()
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    ask()
    second.__exit__(None, None, None)
    ask()
    assert (len(outer.reports), len(inner.reports)) == (0, 1)


def _here(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def test_answers_of_other_models_are_left_alone() -> None:
    with get_risk_callback() as risk:
        FakeListChatModel(responses=["hello"]).invoke("Hi")
        next(FakeListChatModel(responses=["hello"]).stream("Hi"))
    assert (risk.reports, risk.max_risk) == ([], 0.0)


def test_the_latest_reports_are_kept_and_the_highest_risk_of_all(quick_chat: ChatCocoa) -> None:
    with get_risk_callback(max_reports=None) as all_of_them, get_risk_callback(max_reports=1) as latest:
        handler = RiskCallbackHandler(max_reports=2)
        for length in (12, 1, 2, 3):
            quick_chat.invoke("Who invented the telephone?", {"callbacks": [handler]}, max_tokens=length)
    assert len(all_of_them.reports) == 4
    assert (handler.reports, latest.reports) == (all_of_them.reports[-2:], all_of_them.reports[-1:])
    assert handler.max_risk == all_of_them.max_risk == all_of_them.reports[0].max_risk
    assert handler.max_risk > max(report.max_risk or 0.0 for report in handler.reports)
    for refused in (0, -1, True, 1.5, "all"):
        with pytest.raises(ConfigError, match="max_reports"):
            RiskCallbackHandler(max_reports=refused)


@pytest.mark.slow
def test_nothing_else_grows_with_the_number_of_runs(quick_chat: ChatCocoa) -> None:
    handler = RiskCallbackHandler(max_reports=1)
    [chunk, *_] = quick_chat.stream("a", max_tokens=2)
    generation = quick_chat.generate([[HumanMessage("a")]], max_tokens=2)
    for _ in range(3000):
        run_id = uuid.uuid4()
        handler.on_llm_new_token("", chunk=ChatGenerationChunk(message=chunk), run_id=run_id)
        handler.on_llm_end(generation, run_id=run_id)
        handler.on_llm_new_token("", chunk=ChatGenerationChunk(message=chunk), run_id=run_id)  # late
    held = {name: len(value) for name, value in vars(handler).items() if hasattr(value, "__len__")}
    assert held["reports"] == 1
    assert sum(held.values()) < 1100, held


def test_reports_have_the_run_and_the_model(quick_chat: ChatCocoa) -> None:
    run_id = uuid.uuid4()
    with get_risk_callback() as risk:
        quick_chat.invoke("a", {"run_id": run_id}, max_tokens=1)
        next(stream := quick_chat.stream("a"))
        stream.close()
    whole, partial = risk.reports
    assert (whole.run_id, whole.model_name) == (str(run_id), "quick")
    assert uuid.UUID(partial.run_id) != run_id


@pytest.fixture
def client() -> Mock:
    """A client of LangSmith that sends nothing."""
    client: Mock = create_autospec(Client, instance=True)
    client.read_project.return_value.id = PROJECT
    return client


def feedback_of(client: Mock) -> list[dict[str, Any]]:
    """What the client was to send."""
    return [call.kwargs for call in client.create_feedback.call_args_list]


@pytest.fixture
def events() -> Events:
    return Events()


def test_langsmith_gets_feedback_on_every_run(quick_chat: ChatCocoa, client: Mock) -> None:
    scores, run_id = RiskScores(client=client, threshold=0.0), uuid.uuid4()
    answer = quick_chat.invoke("a", {"run_id": run_id, "callbacks": [scores]}, max_tokens=4)
    scores.flush()
    [feedback] = feedback_of(client)
    assert feedback["key"] == "hallucination_risk"
    assert feedback["score"] == near(max_risk(answer))
    assert feedback["run_id"] == feedback["trace_id"] == run_id
    assert feedback["session_id"] == PROJECT
    assert feedback["value"] == "fail"
    assert "how unsure the model was" in feedback["comment"]
    assert feedback["source_info"]["model"] == "quick"


async def test_feedback_in_a_chain_names_the_trace(quick_chat: ChatCocoa, quick_llm: CocoaLLM, client: Mock) -> None:
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
    *of_chains, alone = feedback_of(client)
    assert [feedback["trace_id"] for feedback in of_chains] == [run_id] * 8
    assert len({run_id, *(feedback["run_id"] for feedback in of_chains)}) == 9
    assert alone["trace_id"] == alone["run_id"]


def test_a_run_inside_a_retriever_is_in_its_trace(quick_llm: CocoaLLM, client: Mock) -> None:
    class Rewrites(BaseRetriever):
        """Asks a model before it searches."""

        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            return [Document(quick_llm.invoke(query, {"callbacks": run_manager.get_child()}, max_tokens=1))]

    scores, run_id = RiskScores(client=client), uuid.uuid4()
    callbacks = [LangChainTracer(client=client), scores]
    (RunnableLambda(str) | Rewrites()).invoke("a", {"run_id": run_id, "callbacks": callbacks})
    scores.flush()
    [feedback] = feedback_of(client)
    assert feedback["trace_id"] == run_id != feedback["run_id"]


def test_feedback_inside_a_traced_function_names_its_trace(quick_chat: ChatCocoa, client: Mock) -> None:
    scores, run_id = RiskScores(client=client), uuid.uuid4()

    @traceable
    def ask() -> None:
        quick_chat.invoke("a", {"run_id": run_id, "callbacks": [scores]}, max_tokens=1)

    root = uuid.uuid4()
    with tracing_context(enabled=True, client=client):
        ask(langsmith_extra={"run_id": root, "client": client})
    scores.flush()
    [feedback] = feedback_of(client)
    assert (feedback["run_id"], feedback["trace_id"]) == (run_id, root)


def test_without_a_langsmith_trace_feedback_names_the_run_alone(quick_chat: ChatCocoa, client: Mock) -> None:
    scores = RiskScores(client=client)
    (RunnableLambda(str) | quick_chat).invoke("a", {"callbacks": [scores]})
    scores.flush()
    [feedback] = feedback_of(client)
    assert feedback["run_id"]
    assert feedback["trace_id"] is None


def test_more_feedback_than_can_wait_is_dropped(
    quick_chat: ChatCocoa, client: Mock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_send = threading.Event()
    client.create_feedback.side_effect = lambda **_: may_send.wait(60)
    monkeypatch.setattr("cocoa_integrations.langchain.callbacks._MAX_WAITING", 2)
    scores = RiskScores(client=client)
    for _ in range(3):
        quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    may_send.set()
    scores.flush()
    assert client.create_feedback.call_count == 2
    assert "2 others wait to be sent" in caplog.text
    quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    scores.flush()
    assert client.create_feedback.call_count == 3


def test_a_server_that_fails_does_not_fail_the_call(
    quick_chat: ChatCocoa, client: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    client.create_feedback.side_effect = RuntimeError("no server\x1b[31m" + "x" * 10**6)
    client.read_project.side_effect = RuntimeError("no server")
    scores = RiskScores(client=client)
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
