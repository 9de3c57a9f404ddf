"""Reporting the risk of answers to event handlers, and to collectors around any LlamaIndex call.

``query_engine.query()`` returns a ``Response`` that has only the text of the answer. A collector returns the risk::

    with collect_risk() as reports:
        response = query_engine.query("...")
    reports[-1]["max_risk"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from copy import deepcopy
from types import TracebackType
from typing import Any, Protocol

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import active_span_id

from cocoa_engine import Generation, Span, SpanStream
from cocoa_integrations._shared.metadata import risk_report
from cocoa_integrations._shared.tracing import RiskTrace
from cocoa_integrations.llama_index.events import CocoaRiskEvent, CocoaSpanEvent

_dispatcher = get_dispatcher(__name__)
_collectors: ContextVar[tuple[RiskCollector, ...]] = ContextVar("cocoa_risk_collectors", default=())


class Start(Protocol):
    """Starts an answer. Nothing is decoded before its stream is read."""

    def __call__(self, edit: Callable[[str], str] | None = None) -> SpanStream:
        """Start the answer.

        Args:
            edit: changes each text of the prompt, in order, before the texts are wrapped and encoded.
        """


def collect_risk() -> RiskCollector:
    """Collect the ``cocoa_risk`` report of every answer requested inside the ``with`` block, in order of completion.

    The collector uses a context variable. Async tasks, ``asyncio.to_thread`` and LlamaIndex's own threads that start
    inside the block are included; other tasks and threads are not. Start a ``threading.Thread`` or an executor job with
    ``contextvars.copy_context().run`` to include it. An answer belongs to the block in which it was *requested*: a
    stream may be read later, in another thread, or after the block has ended, and is reported when it has been read to
    its end. Blocks can be nested; the outer block also collects the answers of the inner one.

    Returns:
        A context manager that yields the list of reports. The list grows with every answer.
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
        # Not reset(token): the block may be left in a different context than it was entered in (async fixtures).
        _collectors.set(tuple(collector for collector in _collectors.get() if collector is not self))

    def take(self, generation: Generation, start: Start | None) -> dict[str, Any]:
        """Add an answer and return its report; ``start`` repeats the request."""
        report = risk_report(generation)  # one for each collector, so that changes to one do not affect another
        self.reports.append(report)
        return report


class Observers:
    """The receivers of the events and reports of one answer. Create it inside the call.

    The constructor reads the context variables, because a stream may be read in another context.

    Args:
        start: the function that repeats the request.
    """

    def __init__(self, start: Start | None = None) -> None:
        self._start = start
        self._collectors = _collectors.get()
        self._llama_index_span = active_span_id.get()
        self._trace = RiskTrace()
        self._spans = 0

    def span_decided(self, span: Span) -> None:
        """Report the next span of the answer."""
        _dispatcher.event(CocoaSpanEvent(number=self._spans, span=span, span_id=self._llama_index_span))
        self._spans += 1

    def answer_complete(self, generation: Generation, parts: Mapping[str, Any] | None = None) -> None:
        """Report the complete answer.

        Args:
            generation: the answer.
            parts: what is added to its reports: the risk of its tool calls or fields.
        """
        self._trace.record(generation)
        for collector in self._collectors:
            collector.take(generation, self._start).update(deepcopy(dict(parts or {})))
        report = {**risk_report(generation), **deepcopy(dict(parts or {}))}
        _dispatcher.event(CocoaRiskEvent(report=report, generation=generation, span_id=self._llama_index_span))
