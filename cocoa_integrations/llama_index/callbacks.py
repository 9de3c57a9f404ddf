"""Who is told about an answer's risk: event handlers, and collectors around any LlamaIndex call.

``query_engine.query()`` returns a ``Response`` that keeps only the answer's text. A collector gets the risk past it::

    with collect_risk() as reports:
        response = query_engine.query("...")
    reports[-1]["max_risk"]
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import active_span_id

from cocoa_engine import Generation, Span, SpanStream
from cocoa_integrations.llama_index.events import CocoaRiskEvent, CocoaSpanEvent
from cocoa_integrations.metadata import risk_report
from cocoa_integrations.tracing import RiskTrace

_dispatcher = get_dispatcher(__name__)
_collectors: ContextVar[tuple[RiskCollector, ...]] = ContextVar("cocoa_risk_collectors", default=())


class Start(Protocol):
    """Starts an answer; nothing is decoded before its stream is read."""

    def __call__(self, edit: Callable[[str], str] | None = None) -> SpanStream:
        """Start it.

        Args:
            edit: changes the texts of the prompt, one after the other, before they are wrapped and encoded.
        """


def collect_risk() -> RiskCollector:
    """Collect the ``cocoa_risk`` report of every answer asked for inside the ``with`` block, in order of completion.

    It follows the context: async tasks, ``asyncio.to_thread`` and LlamaIndex's own threads started inside the block
    are covered, other tasks and threads are not (start a bare ``threading.Thread`` or executor job with
    ``contextvars.copy_context().run``). An answer belongs to the block in which it was *asked for*: a stream may be
    read later, in another thread, or after the block has ended, and is reported when it has been read to its end.
    Blocks nest; the outer one sees the inner one's answers too.

    Returns:
        A context manager whose value is the list of reports, shared and growing.
    """
    return RiskCollector()


class RiskCollector:
    """The context manager of :func:`collect_risk`."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def __enter__(self) -> list[dict[str, Any]]:
        _collectors.set((*_collectors.get(), self))
        return self.reports

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not reset(token): the block may be left in another context than it was entered in (async fixtures).
        _collectors.set(tuple(collector for collector in _collectors.get() if collector is not self))

    def take(self, generation: Generation, start: Start | None) -> dict[str, Any]:
        """Take note of an answer; ``start`` would ask for it again. Returns its report."""
        report = risk_report(generation)  # of its own for each collector, so that none can alter another's
        self.reports.append(report)
        return report


class Watchers:
    """Those to tell about one answer, as they stand when it is asked for; make it inside the call.

    Nothing is read from the context later, because a stream may be read in another one.

    Args:
        start: starts the answer, again too.
    """

    def __init__(self, start: Start | None = None) -> None:
        self._start = start
        self._collectors = _collectors.get()
        self._llama_index_span = active_span_id.get()
        self._trace = RiskTrace()
        self._spans = 0

    def span_decided(self, span: Span) -> None:
        """Tell them of the answer's next span."""
        _dispatcher.event(CocoaSpanEvent(number=self._spans, span=span, span_id=self._llama_index_span))
        self._spans += 1

    def answer_complete(self, generation: Generation) -> None:
        """Tell them of the whole answer."""
        self._trace.record(generation)
        for collector in self._collectors:
            collector.take(generation, self._start)
        report = risk_report(generation)
        _dispatcher.event(CocoaRiskEvent(report=report, generation=generation, span_id=self._llama_index_span))
