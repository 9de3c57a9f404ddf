"""Callback handlers: one collects the risk of every answer, one posts it as a score on the trace of the answer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.tracers.context import register_configure_hook
from langsmith import get_current_run_tree
from langsmith import utils as langsmith_utils
from langsmith.run_trees import get_cached_client

from cocoa_engine.integration import safe_logger
from cocoa_engine.report import RiskReport, SpanReport, finite
from cocoa_integrations.reports import find_risk, get_spans
from cocoa_integrations.tracing import MAX_REPORTS, SCORE_NAME, RiskLog, Scoring, emit_event

if TYPE_CHECKING:
    from langsmith import Client
    from opentelemetry._logs import LoggerProvider

logger = safe_logger(__name__)

_ENDED_RUNS = 1024
"""How many ended runs a handler remembers. Both calls for a run that it may get come one after the other."""


class RiskCallbackHandler(RiskLog, BaseCallbackHandler):
    """Collects the risk report of every answer of a CoCoA model, in order of completion.

    Use it through :func:`get_risk_callback`, or pass it like any handler: ``config={"callbacks": [handler]}``. Threads
    can share it. It can be kept for the life of a service: it stores a bounded number of reports.

    Args:
        outer: a handler that receives every report too.
        max_reports: how many reports to keep, the latest ones. ``None``: all of them.

    Attributes:
        reports: the reports, with the ``run_id`` of their run. The report of an answer that was interrupted, by leaving
            a stream early or by an error, has the spans decided until then and is ``partial``; its method is not known.
        max_risk: the highest risk of any span of any answer, including those whose report was dropped; 0.0 without
            answers.

    Raises:
        ConfigError: ``max_reports`` is neither a positive integer nor ``None``.
    """

    def __init__(self, outer: RiskCallbackHandler | None = None, *, max_reports: int | None = MAX_REPORTS) -> None:
        super().__init__(max_reports)
        self._outer = outer
        self._live: dict[UUID, list[SpanReport]] = {}
        self._seen: deque[UUID] = deque(maxlen=_ENDED_RUNS)

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        """Store the spans of a running answer. If it is interrupted, LangChain's own result may lack some of them."""
        if isinstance(chunk, Generation) and (spans := get_spans(chunk)):
            with self.lock:
                if run_id not in self._seen:  # an async handler may be told of a chunk after the end
                    self._live.setdefault(run_id, []).extend(spans)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Store the reports of a completed run."""
        answers = [answer for answers in response.generations for answer in answers]
        self._keep(run_id, [report for answer in answers if (report := find_risk(answer)) is not None])

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Store a partial report. LangChain also calls this if a stream is left early, with a ``GeneratorExit``."""
        spans = self._live.get(run_id)
        self._keep(run_id, [RiskReport.of_spans(spans).with_values(partial=True)] if spans else [])

    def _keep(self, run_id: UUID, reports: Sequence[RiskReport]) -> None:
        with self.lock:
            self._live.pop(run_id, None)
            # called twice if both this handler and an inner one are attached to a chain
            if run_id in self._seen:
                return
            self._seen.append(run_id)
        self.add([report.with_values(run_id=str(run_id)) for report in reports])
        if self._outer is not None:
            self._outer._keep(run_id, reports)


# One variable and one hook per process: hooks are never removed, so one per use would accumulate.
_current: ContextVar[RiskCallbackHandler | None] = ContextVar("cocoa_risk_callback", default=None)
register_configure_hook(_current, inheritable=True)


@contextmanager
def get_risk_callback(*, max_reports: int | None = MAX_REPORTS) -> Iterator[RiskCallbackHandler]:
    """Collect the risk of every CoCoA answer given inside the block, at any depth of chains and agents.

    Works for invoke, batch and stream, sync and async. Blocks can be nested: an outer block also collects the answers
    of an inner one.

    Args:
        max_reports: how many reports to keep, the latest ones. ``None``: all of them.

    Example:
        >>> with get_risk_callback() as risk:
        ...     chain.invoke({"question": "Who wrote Dune?"})
        >>> risk.max_risk
    """
    handler = RiskCallbackHandler(outer=_current.get(), max_reports=max_reports)
    _current.set(handler)
    try:
        yield handler
    finally:  # this context may be another than it was set in (async fixtures, generators)
        inner = _current.get()
        if inner is handler:
            _current.set(handler._outer)
        while inner is not None:
            if inner._outer is handler:
                inner._outer = handler._outer
            inner = inner._outer


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
        self._client, self._project, self._logger_provider = client, project, logger_provider
        self._session_id: UUID | None = None  # of the project, which feedback on a run should have
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="cocoa-scores")  # its thread starts when it is needed
        self._room = threading.BoundedSemaphore(_MAX_WAITING)

    def on_llm_end(
        self, response: LLMResult, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Post the score of a complete answer."""
        trace_id = run_id if parent_run_id is None else getattr(get_current_run_tree(), "trace_id", None)
        client = self._client or (get_cached_client() if langsmith_utils.tracing_is_enabled() is True else None)
        for answer in (answer for answers in response.generations for answer in answers):
            if (report := find_risk(answer)) is None:
                continue
            if client is not None and self._room.acquire(blocking=False):
                feedback = self._sender.submit(self._feedback, client, run_id, trace_id, report)
                feedback.add_done_callback(self._sent)
            elif client is not None:
                logger.warning("the score of run %s is dropped: %d others wait to be sent.", run_id, _MAX_WAITING)
            response_id = answer.message.id if isinstance(answer, ChatGeneration) else None
            emit_event(self._scoring, report, response_id=response_id, provider=self._logger_provider)

    def flush(self) -> None:
        """Wait until the feedback of all answers so far was handed to LangSmith's client."""
        self._sender.submit(int).result()  # it comes after them in the queue

    def _feedback(self, client: Client, run_id: UUID, trace_id: UUID | None, report: RiskReport) -> None:
        if self._session_id is None:
            try:
                name = self._project or langsmith_utils.get_tracer_project()
                self._session_id = client.read_project(project_name=name).id
            except Exception as error:  # the project is created with its first run
                logger.debug("no id for the LangSmith project: %s", error)
        model = {} if report.model_name is None else {"model": report.model_name}
        client.create_feedback(
            run_id=run_id,
            trace_id=trace_id,
            session_id=self._session_id,
            key=self._scoring.name,
            score=finite(self._scoring.score(report)),
            value=self._scoring.label(report),
            comment=self._scoring.explanation(report),
            source_info={"calibrated": report.calibrated, "method": report.method, **model},
        )

    def _sent(self, future: Future[None]) -> None:
        self._room.release()
        if (error := future.exception()) is not None:
            logger.warning("a risk score was not sent to LangSmith: %s", error)
