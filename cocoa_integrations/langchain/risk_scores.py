"""The risk of each answer as a score on its trace, in LangSmith and OpenTelemetry."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult
from langsmith import get_current_run_tree
from langsmith import utils as langsmith_utils
from langsmith.run_trees import get_cached_client

from cocoa_engine.logs import safe_logger
from cocoa_integrations._shared.finite import finite
from cocoa_integrations.langchain.runnables import find_risk
from cocoa_integrations.tracing import SCORE_NAME, Scoring, emit_event

if TYPE_CHECKING:
    from langsmith import Client
    from opentelemetry._logs import LoggerProvider

logger = safe_logger(__name__)

_MAX_WAITING = 1000
"""How much feedback may wait to be sent. More is dropped, such as when LangSmith cannot be reached."""


class RiskScores(BaseCallbackHandler):
    """Posts the risk of every answer as a score on its trace.

    - **LangSmith**: feedback on the run, with the highest risk of any span as its score. It is sent by a thread of this
      handler, so the call does not wait.
    - **OpenTelemetry**: an event ``gen_ai.evaluation.result`` with ``gen_ai.evaluation.name``,
      ``gen_ai.evaluation.score.value``, ``gen_ai.evaluation.explanation``, ``gen_ai.response.id``,
      ``gen_ai.response.model`` and, with a threshold, ``gen_ai.evaluation.score.label``. It belongs to the span that
      is current when the answer is complete. It needs a logger provider.

    Pass it like any handler: ``config={"callbacks": [RiskScores()]}``. Answers of other models, and interrupted ones,
    have no score. One handler can serve all calls of a process.

    Args:
        client: the LangSmith client. Default: LangSmith's own client if its tracing is enabled; otherwise no feedback
            is sent.
        project: the LangSmith project that the runs are sent to. Default: that of the environment.
        name: the name of the score.
        threshold: the risk from which the label is ``fail``; below it is ``pass``. Without one there is no label.
        explain: whether the explanation quotes the riskiest claim of the answer.
        logger_provider: the provider of OpenTelemetry's logger. Default: the global one.

    Raises:
        ConfigError: the name is empty, or the threshold is not a finite number.
    """

    run_inline = True  # in the context of the call

    def __init__(
        self,
        *,
        client: Client | None = None,
        project: str | None = None,
        name: str = SCORE_NAME,
        threshold: float | None = None,
        explain: bool = True,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        super().__init__()
        self._scoring = Scoring(name, threshold, explain)
        self._client = client
        self._project = project
        self._session_id: UUID | None = None
        self._logger_provider = logger_provider
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="cocoa-scores")  # its thread starts when it is needed
        self._room = threading.BoundedSemaphore(_MAX_WAITING)

    def on_llm_end(
        self, response: LLMResult, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Post the score of a complete answer."""
        trace_id = run_id if parent_run_id is None else getattr(get_current_run_tree(), "trace_id", None)
        for answer in (answer for answers in response.generations for answer in answers):
            if (report := find_risk(answer)) is not None:
                response_id = answer.message.id if isinstance(answer, ChatGeneration) else None
                self._send(run_id, trace_id, report)
                emit_event(self._scoring, report, response_id=response_id, provider=self._logger_provider)

    def flush(self) -> None:
        """Wait until the feedback of all answers so far was handed to LangSmith's client."""
        self._sender.submit(int).result()  # it comes after them in the queue

    def _send(self, run_id: UUID, trace_id: UUID | None, report: dict[str, Any]) -> None:
        client = self._client
        if client is None and langsmith_utils.tracing_is_enabled() is True:
            client = get_cached_client()
        if client is None:
            return
        if not self._room.acquire(blocking=False):
            logger.warning("the score of run %s is dropped: %d others wait to be sent.", run_id, _MAX_WAITING)
            return
        self._sender.submit(self._feedback, client, run_id, trace_id, report).add_done_callback(self._sent)

    def _feedback(self, client: Client, run_id: UUID, trace_id: UUID | None, report: dict[str, Any]) -> None:
        model = {} if report.get("model_name") is None else {"model": report["model_name"]}
        client.create_feedback(
            run_id=run_id,
            trace_id=trace_id,
            session_id=self._project_id(client),
            key=self._scoring.name,
            score=finite(self._scoring.score(report)),
            value=self._scoring.label(report),
            comment=self._scoring.explanation(report),
            source_info={"calibrated": report["calibrated"], "method": report["method"], **model},
        )

    def _project_id(self, client: Client) -> UUID | None:
        """The id of the project, which feedback on a run should have; ``None`` if it cannot be found yet."""
        if self._session_id is None:
            try:
                name = self._project or langsmith_utils.get_tracer_project()
                self._session_id = client.read_project(project_name=name).id
            except Exception as error:  # the project is created with its first run
                logger.debug("no id for the LangSmith project: %s", error)
        return self._session_id

    def _sent(self, future: Future[None]) -> None:
        self._room.release()
        if (error := future.exception()) is not None:
            logger.warning("a risk score was not sent to LangSmith: %s", error)
