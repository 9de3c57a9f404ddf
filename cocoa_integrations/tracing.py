"""Risk in traces: attributes of OpenTelemetry spans, and scores.

A span gets the attributes ``cocoa.max_risk``, ``cocoa.mean_risk``, ``cocoa.risk_points``, ``cocoa.calibrated`` and
``cocoa.answers`` of all complete answers that were requested while it was current. See docs/how-to/act-on-risk.md.
"""

import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cocoa_engine import __version__
from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import free_in_child
from cocoa_engine.report import RiskReport, finite, severity
from cocoa_integrations._shared.limits import Limit, highest, measured_units

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.trace import Span

__all__ = ["RiskTrace"]

MAX_REPORTS = 10_000  # that a handler keeps by default
SCORE_NAME = "hallucination_risk"
EVENT_NAME = "gen_ai.evaluation.result"


# the sum and number of the risks under a span, and its attributes, which cannot be read back
_totals: "WeakKeyDictionary[Span, tuple[float, int, dict[str, Any]]]" = WeakKeyDictionary()
_lock = free_in_child(threading.Lock())


class RiskLog:
    """The ``reports`` of the latest answers and the ``max_risk`` of all, which threads can share."""

    def __init__(self, max_reports: int | None = MAX_REPORTS) -> None:
        if max_reports is not None and (type(max_reports) is not int or max_reports < 1):
            raise ConfigError(f"max_reports takes a positive integer, or None for all reports, not {max_reports!r}")
        self.reports: list[RiskReport] = []
        self.max_risk = 0.0
        self.max_reports = max_reports
        self.lock = free_in_child(threading.Lock())

    def add(self, reports: Iterable[RiskReport]) -> None:
        with self.lock:
            for report in reports:
                self.reports.append(report.with_values(spans=list(report.spans)))  # its own list
                self.max_risk = max(self.max_risk, severity(report.max_risk))
            if self.max_reports is not None:
                del self.reports[: -self.max_reports]


class RiskTrace:
    """Writes the risk of answers to the OpenTelemetry span that is current when it is created, inside the call."""

    def __init__(self) -> None:
        self.span: Span | None = None
        if _is_traced():
            from opentelemetry.trace import get_current_span

            span = get_current_span()
            # an instrumentation may make a proxy current, which stands for another span once the call has returned
            self.span = getattr(span.set_attributes, "__self__", span)

    @property
    def is_recording(self) -> bool:
        return self.span is not None and self.span.is_recording()

    def record(self, answer: Any) -> None:
        """Add a complete answer, whose ``report`` is `None` if a server sent none."""
        report: RiskReport | None = answer.report
        if self.span is None or not self.is_recording or report is None:
            return
        risks = [severity(span.risk) for span in report.answer_spans if not span.is_unmeasured]
        with _lock:  # the calls of a batch may run under the same span
            total, spans, before = _totals.get(self.span, (0.0, 0, {}))
            total, spans = total + sum(risks), spans + len(risks)
            attributes = {
                "cocoa.max_risk": max([before.get("cocoa.max_risk", 0.0), *risks]),
                "cocoa.mean_risk": total / spans if spans else 0.0,
                "cocoa.risk_points": before.get("cocoa.risk_points", 0) + report.risk_points,
                "cocoa.calibrated": before.get("cocoa.calibrated", True) and report.calibrated,
                "cocoa.answers": before.get("cocoa.answers", 0) + 1,
            }
            _totals[self.span] = total, spans, attributes
            self.span.set_attributes(attributes)

    def current(self) -> AbstractContextManager[object]:
        if self.span is None:
            return nullcontext()
        from opentelemetry.trace import use_span

        return use_span(self.span, record_exception=False, set_status_on_exception=False)


@dataclass(frozen=True)
class Scoring:
    """How a report becomes a score with a label, and an explanation that quotes the riskiest claim."""

    name: str = SCORE_NAME
    threshold: float | None = None
    explain: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name takes the name of a score, not {self.name!r}")
        if self.threshold is not None:
            Limit(self.threshold)

    def score(self, report: RiskReport) -> float:
        """The highest risk of any span with visible text, infinite if one is not a finite number."""
        return highest(report.spans, "risk")

    def label(self, report: RiskReport) -> str | None:
        if self.threshold is None:
            return None
        return "fail" if self.score(report) >= self.threshold else "pass"

    def explanation(self, report: RiskReport) -> str:
        kind = report.risk_meaning or "source unknown"
        score = f"highest risk of any span ({kind})"
        claims = measured_units(report.spans, "risk", "claim") if self.explain else []
        riskiest = max(claims, key=lambda measured: measured[1])[0].text if claims else None
        # a compact report has no texts
        return score if riskiest is None else f"{score}; the riskiest claim is {riskiest.strip()!r}"


def emit_event(
    scoring: Scoring, report: RiskReport, *, response_id: str | None, provider: "LoggerProvider | None"
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
