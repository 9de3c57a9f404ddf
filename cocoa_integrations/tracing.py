"""Risk in traces: attributes of OpenTelemetry spans, and scores.

The adapters write the risk of an answer to the OpenTelemetry span that is current when the answer is requested, if the
span is still recording when the answer is complete. There is nothing to enable: ``opentelemetry-api`` (the extra
``tracing``) is enough. A process that has not imported OpenTelemetry pays one look-up in ``sys.modules``.

==========================  ===================================================================
``cocoa.max_risk``          the highest risk of any text span of any answer
``cocoa.mean_risk``         the mean risk over the text spans of all answers
``cocoa.risk_points``       the number of risk points in all answers
``cocoa.calibrated``        whether all these risks are calibrated
``cocoa.answers``           the number of answers
==========================  ===================================================================

"All answers" are the answers requested under the same OpenTelemetry span: one for a span around a model call, all
answers of the chain for a span around a chain. Only the innermost span is written to. Answers from a LangChain cache
are not decoded and are not counted. Neither are answers that were interrupted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from cocoa_engine import __version__
from cocoa_engine.errors import ConfigError
from cocoa_engine.forks import free_in_child
from cocoa_engine.rendering.wording import SOURCES
from cocoa_engine.report import RiskReport, finite, severity
from cocoa_integrations._shared.limits import Limit, highest, measured_units

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.trace import Span

__all__ = ["RiskTrace"]

MAX_REPORTS = 10_000
"""How many reports a handler keeps by default."""

SCORE_NAME = "hallucination_risk"
EVENT_NAME = "gen_ai.evaluation.result"


@dataclass
class _Totals:
    """The risk of all answers under one OpenTelemetry span."""

    max_risk: float = 0.0
    sum_risk: float = 0.0
    spans: int = 0
    risk_points: int = 0
    answers: int = 0
    calibrated: bool = True

    def add(self, report: RiskReport) -> None:
        risks = [severity(span.risk) for span in report.answer_spans if not span.is_unmeasured]
        self.max_risk = max([self.max_risk, *risks])
        self.sum_risk += sum(risks)
        self.spans += len(risks)
        self.risk_points += report.risk_points
        self.answers += 1
        self.calibrated &= report.calibrated

    def attributes(self) -> dict[str, float | int | bool]:
        return {
            "cocoa.max_risk": self.max_risk,
            "cocoa.mean_risk": self.sum_risk / self.spans if self.spans else 0.0,
            "cocoa.risk_points": self.risk_points,
            "cocoa.calibrated": self.calibrated,
            "cocoa.answers": self.answers,
        }


class HasReport(Protocol):
    """An answer of a chat service."""

    @property
    def report(self) -> RiskReport | None:
        """Its report; ``None`` if a server sent none."""


_totals: WeakKeyDictionary[Span, _Totals] = WeakKeyDictionary()  # the attributes of a span cannot be read back
_lock = free_in_child(threading.Lock())


class RiskLog:
    """The reports of the latest answers. Threads can share it.

    Args:
        max_reports: how many reports to keep. ``None``: all of them.

    Attributes:
        reports: the reports.
        max_risk: the highest risk of any span of any answer, including those whose report was dropped; 0.0 without
            answers.

    Raises:
        ConfigError: ``max_reports`` is neither a positive integer nor ``None``.
    """

    def __init__(self, max_reports: int | None = MAX_REPORTS) -> None:
        is_number = isinstance(max_reports, int) and not isinstance(max_reports, bool)
        if max_reports is not None and not (is_number and max_reports >= 1):
            raise ConfigError(
                f"max_reports takes a positive integer, or None to keep every report, not {max_reports!r}"
            )
        self.reports: list[RiskReport] = []
        self.max_risk = 0.0
        self.max_reports = max_reports
        self._lock = free_in_child(threading.Lock())

    def add(self, reports: Iterable[RiskReport]) -> None:
        """Append reports, and drop the oldest ones that are too many."""
        with self._lock:
            for report in reports:
                self.reports.append(report.with_values(spans=list(report.spans)))  # its own list
                self.max_risk = max(self.max_risk, severity(report.max_risk))
            if self.max_reports is not None:
                del self.reports[: -self.max_reports]


class RiskTrace:
    """Writes the risk of answers to the current OpenTelemetry span.

    Create it inside the call. The span is stored because a stream may be read in another context or thread.

    Attributes:
        span: the current span; ``None`` if the process has not imported OpenTelemetry.
    """

    def __init__(self) -> None:
        self.span: Span | None = None
        if _is_traced():
            from opentelemetry.trace import get_current_span

            span = get_current_span()
            # an instrumentation may make a proxy current, which stands for another span once the call has returned
            self.span = getattr(span.set_attributes, "__self__", span)

    @property
    def is_recording(self) -> bool:
        """Whether the span still takes attributes."""
        return self.span is not None and self.span.is_recording()

    def record(self, answer: HasReport) -> None:
        """Add a complete answer."""
        if self.span is not None and self.span.is_recording() and answer.report is not None:
            with _lock:  # the calls of a batch may run under the same span
                totals = _totals.setdefault(self.span, _Totals())
                totals.add(answer.report)
                self.span.set_attributes(totals.attributes())

    def current(self) -> AbstractContextManager[object]:
        """A context manager in which the span is current again."""
        if self.span is None:
            return nullcontext()
        from opentelemetry.trace import use_span

        return use_span(self.span, record_exception=False, set_status_on_exception=False)


@dataclass(frozen=True)
class Scoring:
    """How a report becomes a score.

    Attributes:
        name: the name of the score.
        threshold: the risk from which the label is ``fail``; below it is ``pass``. Without one there is no label.
        explain: whether the explanation quotes the riskiest claim.

    Raises:
        ConfigError: the name is empty, or the threshold is not a finite number.
    """

    name: str = SCORE_NAME
    threshold: float | None = None
    explain: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name takes the name of a score, not {self.name!r}")
        if self.threshold is not None:
            Limit(self.threshold)

    def score(self, report: RiskReport) -> float:
        """The highest risk of any span with visible text; the reasoning does not count.

        It is infinite if the risk of a span is not a finite number.
        """
        return highest(report.spans, "risk")

    def label(self, report: RiskReport) -> str | None:
        """``pass`` or ``fail``; ``None`` without a threshold."""
        if self.threshold is None:
            return None
        return "fail" if self.score(report) >= self.threshold else "pass"

    def explanation(self, report: RiskReport) -> str:
        """What the score is, and the riskiest claim."""
        kind = SOURCES.get(report.risk_source or "", "source unknown")
        score = f"highest risk of any span ({kind})"
        claims = measured_units(report.spans, "risk", "claim") if self.explain else []
        riskiest = max(claims, key=lambda measured: measured[1])[0].text if claims else None
        # a compact report has no texts
        return score if riskiest is None else f"{score}; the riskiest claim is {riskiest.strip()!r}"


def emit_event(
    scoring: Scoring, report: RiskReport, *, response_id: str | None, provider: LoggerProvider | None
) -> None:
    """Emit the ``gen_ai.evaluation.result`` event of an answer, in the context of the current span."""
    if provider is None and not _is_traced():
        return
    from opentelemetry._logs import LogRecord, get_logger_provider

    attributes = {
        "gen_ai.evaluation.name": scoring.name,
        "gen_ai.evaluation.score.value": finite(scoring.score(report)),
        "gen_ai.evaluation.score.label": scoring.label(report),
        "gen_ai.evaluation.explanation": scoring.explanation(report),
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": report.model_name,
    }
    logger = (provider or get_logger_provider()).get_logger("cocoa_integrations", __version__)
    present = {name: value for name, value in attributes.items() if value is not None}
    logger.emit(LogRecord(event_name=EVENT_NAME, attributes=present))


def _is_traced() -> bool:
    """Whether this process has imported OpenTelemetry. Otherwise there can be no span."""
    return "opentelemetry.trace" in sys.modules
