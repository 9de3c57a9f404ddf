"""A callback handler that collects the risk of every answer, and a context manager that attaches it."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import Generation, LLMResult
from langchain_core.tracers.context import register_configure_hook

from cocoa_engine.forks import free_in_child
from cocoa_integrations._shared.finite import severity
from cocoa_integrations._shared.metadata import report_of
from cocoa_integrations._shared.recent_reports import MAX_REPORTS, add_reports, require_max_reports
from cocoa_integrations.langchain.runnables import find_risk, get_spans

_ENDED_RUNS = 1024
"""How many ended runs a handler remembers. Both calls for a run that it may get come one after the other."""


class RiskCallbackHandler(BaseCallbackHandler):
    """Collects the risk report of every answer of a CoCoA model, in order of completion.

    Use it through :func:`get_risk_callback`, or pass it like any handler: ``config={"callbacks": [handler]}``. Threads
    can share it. It can be kept for the life of a service: it stores a bounded number of reports.

    Args:
        outer: a handler that receives every report too.
        max_reports: how many reports to keep, the latest ones. ``None``: all of them.

    Attributes:
        reports: the ``cocoa_risk`` reports, with the ``run_id`` of their run. The report of an answer that was
            interrupted, by leaving a stream early or by an error, has the spans decided until then and
            ``"partial": True``; its method is not known.

    Raises:
        ConfigError: ``max_reports`` is neither a positive integer nor ``None``.
    """

    def __init__(self, outer: RiskCallbackHandler | None = None, *, max_reports: int | None = MAX_REPORTS) -> None:
        super().__init__()
        require_max_reports(max_reports)
        self.reports: list[dict[str, Any]] = []
        self.max_reports = max_reports
        self._outer = outer
        self._max_risk = 0.0
        self._live: dict[UUID, list[dict[str, Any]]] = {}
        self._seen: deque[UUID] = deque(maxlen=_ENDED_RUNS)
        self._lock = free_in_child(threading.Lock())

    @property
    def max_risk(self) -> float:
        """The highest risk of any span of any answer, including those whose report was dropped; 0.0 without answers."""
        with self._lock:
            return self._max_risk

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        """Store the spans of a running answer. If it is interrupted, LangChain's own result may lack some of them."""
        if isinstance(chunk, Generation) and (spans := get_spans(chunk)):
            with self._lock:
                if run_id not in self._seen:  # an async handler may be told of a chunk after the end
                    self._live.setdefault(run_id, []).extend(spans)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Store the reports of a completed run."""
        answers = [answer for answers in response.generations for answer in answers]
        self._keep(run_id, [report for answer in answers if (report := find_risk(answer)) is not None])

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Store a partial report. LangChain also calls this if a stream is left early, with a ``GeneratorExit``."""
        spans = self._live.get(run_id)
        self._keep(run_id, [_partial_report(spans)] if spans else [])

    def _keep(self, run_id: UUID, reports: list[dict[str, Any]]) -> None:
        with self._lock:
            self._live.pop(run_id, None)
            # called twice if both this handler and an inner one are attached to a chain
            if run_id in self._seen:
                return
            self._seen.append(run_id)
            # copies, which are not shared with the answer or with other handlers
            added = [{**copy.deepcopy(report), "run_id": str(run_id)} for report in reports]
            add_reports(self.reports, added, self.max_reports)
            self._max_risk = max([self._max_risk, *(severity(report["max_risk"]) for report in added)])
        if self._outer is not None:
            self._outer._keep(run_id, reports)


def _partial_report(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """A ``cocoa_risk`` report of the spans that were decided before an answer was interrupted."""
    return {**report_of(spans, method=None, risk_source=None), "partial": True}


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
    finally:
        _leave(handler)


def _leave(handler: RiskCallbackHandler) -> None:
    """Remove a handler from this context.

    Not ``reset(token)``: a block may be left in a different context than it was entered in (async fixtures), or before
    a block inside it (generators).
    """
    inner = _current.get()
    if inner is handler:
        _current.set(handler._outer)
    while inner is not None:
        if inner._outer is handler:
            inner._outer = handler._outer
        inner = inner._outer
