"""Collecting the risk of every answer that is given while a block of code runs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import Generation, LLMResult
from langchain_core.tracers.context import register_configure_hook

from cocoa_integrations.langchain.runnables import find_risk, get_spans
from cocoa_integrations.metadata import report_of


class RiskCallbackHandler(BaseCallbackHandler):
    """Keeps the risk report of every answer of a CoCoA model, in the order in which they ended.

    Use it through :func:`get_risk_callback`, or pass it as any handler: ``config={"callbacks": [handler]}``. Safe to
    share between threads.

    Attributes:
        reports: the ``cocoa_risk`` reports. An answer that was broken off (by leaving a stream early, or by an error)
            has one of the spans it had, with ``"partial": True``; its method is not known.
    """

    def __init__(self, outer: RiskCallbackHandler | None = None) -> None:
        """``outer`` is told of every answer too."""
        super().__init__()
        self.reports: list[dict[str, Any]] = []
        self._outer = outer
        self._live: dict[UUID, list[dict[str, Any]]] = {}
        self._seen: set[UUID] = set()
        self._lock = threading.Lock()

    @property
    def max_risk(self) -> float:
        """The highest risk of any span of any answer; 0.0 without answers."""
        with self._lock:
            return max((report["max_risk"] for report in self.reports), default=0.0)

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        """Remember the spans of a run that is under way: what LangChain hands on when it breaks off may lack some."""
        if isinstance(chunk, Generation) and (spans := get_spans(chunk)):
            with self._lock:
                self._live.setdefault(run_id, []).extend(spans)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Keep the reports of a run that ended well."""
        answers = [answer for answers in response.generations for answer in answers]
        self._keep(run_id, [report for answer in answers if (report := find_risk(answer)) is not None])

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Keep what is known of a run that broke off; leaving a stream early ends here too, in a ``GeneratorExit``."""
        spans = self._live.get(run_id)
        self._keep(run_id, [_partial_report(spans)] if spans else [])

    def _keep(self, run_id: UUID, reports: list[dict[str, Any]]) -> None:
        with self._lock:
            self._live.pop(run_id, None)
            # Told twice where both this handler and an inner one are attached to a chain.
            if run_id in self._seen:
                return
            self._seen.add(run_id)
            self.reports.extend(copy.deepcopy(reports))  # so that nobody alters another's, or the answer itself
        if self._outer is not None:
            self._outer._keep(run_id, reports)


def _partial_report(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """A ``cocoa_risk`` report of the spans that were decided before an answer was broken off."""
    return {**report_of(spans, method=None, calibrated=False), "partial": True}


# One variable and one hook for the life of the process: a hook is never removed, so one per use would pile up.
_current: ContextVar[RiskCallbackHandler | None] = ContextVar("cocoa_risk_callback", default=None)
register_configure_hook(_current, inheritable=True)


@contextmanager
def get_risk_callback() -> Iterator[RiskCallbackHandler]:
    """Collect the risk of every CoCoA answer given inside the block, however deep in chains or agents.

    Works for invoke, batch and stream, sync and async. Blocks nest: an outer one also sees what an inner one sees.

    Example:
        >>> with get_risk_callback() as risk:
        ...     chain.invoke({"question": "Who wrote Dune?"})
        >>> risk.max_risk
    """
    handler = RiskCallbackHandler(outer=_current.get())
    _current.set(handler)
    try:
        yield handler
    finally:
        _leave(handler)


def _leave(handler: RiskCallbackHandler) -> None:
    """Take a handler out of this context.

    Not ``reset(token)``: a block may be left in another context than it was entered in (async fixtures), or before a
    block inside it (generators).
    """
    inner = _current.get()
    if inner is handler:
        _current.set(handler._outer)
    while inner is not None:
        if inner._outer is handler:
            inner._outer = handler._outer
        inner = inner._outer
