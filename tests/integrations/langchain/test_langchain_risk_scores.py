"""Risk as LangSmith feedback, and as OpenTelemetry evaluation events."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import LangChainTracer
from langsmith import Client, traceable, tracing_context

from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import ChatCocoa, CocoaLLM, RiskScores, max_risk

pytest.importorskip("opentelemetry.sdk")

from tests.helpers.alike import near
from tests.helpers.span_handlers import Events, Spans  # it needs the SDK

pytestmark = pytest.mark.also_remote

PROJECT = uuid.uuid4()


class Server:
    """A LangSmith server on this machine that records the feedback it is sent."""

    def __init__(self) -> None:
        feedback: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def _reply(self, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if "/sessions" in self.path:
                    project = {
                        "id": str(PROJECT),
                        "name": "ours",
                        "tenant_id": str(PROJECT),
                        "start_time": "2026-01-01",
                        "reference_dataset_id": None,
                    }
                    self._reply([project])
                else:  # /info: an old server, to which feedback is sent at once
                    self._reply({"version": "0.8.0"})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path.endswith("/feedback"):
                    feedback.append(json.loads(body))
                self._reply({})

            def log_message(self, *args: Any) -> None: ...

        self.feedback = feedback
        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(api_url=server.url, api_key="none", auto_batch_tracing=False)


@pytest.fixture
def events() -> Events:
    return Events()


def test_langsmith_gets_feedback_on_every_run(quick_chat: ChatCocoa, client: Client, server: Server) -> None:
    scores, run_id = RiskScores(client=client, threshold=0.0), uuid.uuid4()
    answer = quick_chat.invoke("a", {"run_id": run_id, "callbacks": [scores]}, max_tokens=4)
    scores.flush()
    [feedback] = server.feedback
    assert feedback["key"] == "hallucination_risk"
    assert feedback["score"] == near(max_risk(answer))
    assert feedback["run_id"] == feedback["trace_id"] == str(run_id)
    assert feedback["session_id"] == str(PROJECT)
    assert feedback["value"] == "fail"
    assert "how unsure the model was" in feedback["comment"]
    assert feedback["feedback_source"]["metadata"]["model"] == "quick"


async def test_feedback_in_a_chain_names_the_trace(
    quick_chat: ChatCocoa, quick_llm: CocoaLLM, client: Client, server: Server
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
    *of_chains, alone = server.feedback
    assert [feedback["trace_id"] for feedback in of_chains] == [str(run_id)] * 8
    assert len({str(run_id), *(feedback["run_id"] for feedback in of_chains)}) == 9
    assert alone["trace_id"] == alone["run_id"]


def test_feedback_inside_a_traced_function_names_its_trace(
    quick_chat: ChatCocoa, client: Client, server: Server
) -> None:
    scores, run_id = RiskScores(client=client), uuid.uuid4()

    @traceable
    def ask() -> None:
        quick_chat.invoke("a", {"run_id": run_id, "callbacks": [scores]}, max_tokens=1)

    root = uuid.uuid4()
    with tracing_context(enabled=True, client=client):
        ask(langsmith_extra={"run_id": root, "client": client})
    scores.flush()
    [feedback] = server.feedback
    assert (feedback["run_id"], feedback["trace_id"]) == (str(run_id), str(root))


def test_without_a_langsmith_trace_feedback_names_the_run_alone(
    quick_chat: ChatCocoa, client: Client, server: Server
) -> None:
    scores = RiskScores(client=client)
    (RunnableLambda(str) | quick_chat).invoke("a", {"callbacks": [scores]})
    scores.flush()
    [feedback] = server.feedback
    assert feedback["run_id"]
    assert "trace_id" not in feedback


def test_more_feedback_than_can_wait_is_dropped(
    quick_chat: ChatCocoa, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, may_send = [], threading.Event()

    class Slow(Client):
        def create_feedback(self, *args: Any, **kwargs: Any) -> Any:
            may_send.wait(60)
            sent.append(kwargs["run_id"])

        def read_project(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no server")

    monkeypatch.setattr("cocoa_integrations.langchain.callbacks._MAX_WAITING", 2)
    scores = RiskScores(client=Slow(api_url="http://127.0.0.1:9", api_key="none", auto_batch_tracing=False))
    for _ in range(3):
        quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    may_send.set()
    scores.flush()
    assert len(sent) == 2
    assert "2 others wait to be sent" in caplog.text
    quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    scores.flush()
    assert len(sent) == 3


def test_without_langsmith_nothing_is_sent(
    quick_chat: ChatCocoa, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGSMITH_ENDPOINT", server.url)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    scores = RiskScores()
    quick_chat.invoke("a", {"callbacks": [scores]}, max_tokens=1)
    scores.flush()
    assert server.feedback == []


def test_a_server_that_fails_does_not_fail_the_call(quick_chat: ChatCocoa, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Client):
        def create_feedback(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no server\x1b[31m" + "x" * 10**6)

        def read_project(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no server")

    scores = RiskScores(client=Broken(api_url="http://127.0.0.1:9", api_key="none", auto_batch_tracing=False))
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
