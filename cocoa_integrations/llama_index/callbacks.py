"""Reporting the risk of answers to event handlers, and to collectors around any LlamaIndex call.

``query_engine.query()`` returns a ``Response`` that has only the text of the answer. A collector returns the risk::

    with collect_risk() as reports:
        response = query_engine.query("...")
    reports[-1].max_risk

LlamaIndex suppresses exceptions of event handlers, so a handler can observe an answer but not stop it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from llama_index.core.bridge.pydantic import PlainSerializer, PrivateAttr
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.schema import NodeWithScore

from cocoa_engine import Generation
from cocoa_engine.report import RiskReport, SpanReport
from cocoa_integrations.chat_service import Answer, ChatCall, LocalChat, Piece
from cocoa_integrations.tracing import MAX_REPORTS, SCORE_NAME, RiskLog, RiskTrace, Scoring, emit_event

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider

_dispatcher = get_dispatcher(__name__)
_collectors: ContextVar[tuple[RiskCollector, ...]] = ContextVar("cocoa_risk_collectors", default=())
_requests = itertools.count()
_END: Any = object()
Item = TypeVar("Item")


class CocoaSpanEvent(BaseEvent):
    """A span was decided. In a stream, the event is sent before the text of the span is yielded.

    The inherited ``span_id`` is the id of the instrumentation span of the LLM call. All events of one answer share it.
    """

    number: int
    span: SpanReport

    @classmethod
    def class_name(cls) -> str:
        """The name of the event in handlers and exports."""
        return "CocoaSpanEvent"


class CocoaRiskEvent(BaseEvent):
    """An answer is complete. There is exactly one event per generation, for every kind of call.

    Exports of the event have the JSON form of ``report``. ``generation`` is the answer of the engine, and ``None`` if
    the model is at a server. A generation that fails, is cancelled or is abandoned has no complete answer and sends no
    such event.
    """

    report: Annotated[RiskReport, PlainSerializer(RiskReport.to_dict)]
    generation: Generation | None

    @classmethod
    def class_name(cls) -> str:
        """The name of the event in handlers and exports."""
        return "CocoaRiskEvent"


def collect_risk(*, max_reports: int | None = MAX_REPORTS) -> RiskCollector:
    """Collect the :class:`.RiskReport` of every answer requested inside the ``with`` block, in order of completion.

    The collector uses a context variable. Async tasks, ``asyncio.to_thread`` and LlamaIndex's own threads that start
    inside the block are included; other tasks and threads are not. Start a ``threading.Thread`` or an executor job with
    ``contextvars.copy_context().run`` to include it. An answer belongs to the block in which it was *requested*: a
    stream may be read later, in another thread, or after the block has ended, and is reported when it has been read to
    its end. Blocks can be nested; the outer block also collects the answers of the inner one.

    Args:
        max_reports: how many reports to keep, the latest ones. ``None``: all of them.

    Returns:
        A context manager that yields the list of reports, to which every answer is added.

    Raises:
        ConfigError: ``max_reports`` is neither a positive integer nor ``None``.
    """
    return RiskCollector(max_reports=max_reports)


@dataclass(frozen=True)
class Collected:
    """A complete answer, as collectors receive it. One of a server has no ``generation`` and no ``asked``."""

    report: RiskReport
    generation: Generation | None
    asked: tuple[LocalChat, ChatCall] | None
    request: int  # later requests have higher numbers
    node_ids: Sequence[str] = ()  # the retrieved nodes that its passage_attention is of

    @property
    def begin(self) -> int:
        """The offset in the generated text at which the answer begins, after any reasoning."""
        return self.report.begin

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(span.text or "" for span in self.report.spans)


def collected_nodes() -> list[NodeWithScore] | None:
    """The retrieved nodes of the innermost collector of nodes; ``None`` if there is none."""
    return next((collector.nodes for collector in reversed(_collectors.get()) if collector.nodes is not None), None)


class RiskCollector(RiskLog):
    """The context manager of :func:`collect_risk`.

    Attributes:
        reports: the latest reports.
        max_risk: the highest risk of any span of any answer, including those whose report was dropped.
    """

    nodes: list[NodeWithScore] | None = None
    """The nodes that are retrieved inside the block, if they are collected."""

    def __enter__(self) -> list[RiskReport]:
        _collectors.set((*_collectors.get(), self))
        return self.reports

    def __exit__(self, *error: object) -> None:
        # Not reset(token): the block may be left in a different context than it was entered in (async fixtures).
        _collectors.set(tuple(collector for collector in _collectors.get() if collector is not self))

    def reading(self, items: Iterator[Item]) -> Generator[Item, None, None]:
        """Pass a stream on, and collect the answers that are requested while it is read."""
        try:
            while True:
                with self:  # not across the yield, which would add the collector to the context of the reader
                    item = next(items, _END)
                if item is _END:
                    return
                yield item
        finally:
            if isinstance(items, Generator):
                items.close()

    async def areading(self, items: AsyncIterator[Item]) -> AsyncGenerator[Item, None]:
        """Like :meth:`reading`."""
        try:
            while True:
                with self:
                    item = await anext(items, _END)
                if item is _END:
                    return
                yield item
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    def take(self, answer: Collected) -> None:
        """Add an answer."""
        self.add([answer.report])


class Observers:
    """The receivers of the events and reports of one answer. Create it inside the call.

    The constructor reads the context variables, because a stream may be read in another context.
    """

    def __init__(self, asked: tuple[LocalChat, ChatCall] | None = None, node_ids: Sequence[str] = ()) -> None:
        self._asked, self._node_ids = asked, node_ids
        self._request = next(_requests)
        self._collectors = _collectors.get()
        self._llama_index_span = active_span_id.get()
        self._trace = RiskTrace()
        self._spans = 0

    def span_decided(self, piece: Piece) -> None:
        """Report the next span of the answer, if the piece has one."""
        if piece.entry is not None:
            number, self._spans = self._spans, self._spans + 1
            _dispatcher.event(CocoaSpanEvent(number=number, span=piece.entry, span_id=self._llama_index_span))

    def answer_complete(self, answer: Answer) -> None:
        """Report the complete answer. One of a server that measures no risk is not reported."""
        report, run_id = answer.report, self._llama_index_span
        if report is None:
            return
        report = report if run_id is None else report.with_values(run_id=run_id)
        collected = Collected(report, answer.generation, self._asked, self._request, tuple(self._node_ids))
        self._trace.record(collected)
        for collector in self._collectors:
            collector.take(collected)
        with self._trace.current():
            _dispatcher.event(CocoaRiskEvent(report=report, generation=answer.generation, span_id=run_id))


class RiskScores(BaseEventHandler):
    """Emits the risk of every answer as an OpenTelemetry event ``gen_ai.evaluation.result``.

    The event belongs to the span that is current when the answer is requested. It has ``gen_ai.evaluation.name``,
    ``gen_ai.evaluation.score.value`` (the highest risk of any span), ``gen_ai.evaluation.explanation``,
    ``gen_ai.response.model`` and, with a threshold, ``gen_ai.evaluation.score.label``.

    Args:
        name: the name of the score.
        threshold: the risk from which the label is ``fail``; below it is ``pass``. Without one there is no label.
        explain: whether the explanation quotes the riskiest claim of the answer.
        logger_provider: the provider of the logger. Default: OpenTelemetry's global one.

    Raises:
        ConfigError: the name is empty, or the threshold is not a finite number.

    Example:
        >>> get_dispatcher().add_event_handler(RiskScores(threshold=0.5))
    """

    _scoring: Scoring = PrivateAttr()
    _logger_provider: Any = PrivateAttr()

    def __init__(
        self,
        *,
        name: str = SCORE_NAME,
        threshold: float | None = None,
        explain: bool = True,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        super().__init__()
        self._scoring = Scoring(name, threshold, explain)
        self._logger_provider = logger_provider

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Emit the score of a complete answer."""
        if isinstance(event, CocoaRiskEvent):
            emit_event(self._scoring, event.report, response_id=None, provider=self._logger_provider)
