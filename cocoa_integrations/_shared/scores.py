"""The risk of an answer as a score, and as an OpenTelemetry event of the semantic conventions for generative AI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cocoa_engine import __version__
from cocoa_engine.errors import ConfigError
from cocoa_engine.rendering.wording import SOURCES
from cocoa_integrations._shared.finite import finite
from cocoa_integrations._shared.limits import Limit, highest, measured_units
from cocoa_integrations._shared.tracing import is_traced

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.trace import Span

SCORE_NAME = "hallucination_risk"
EVENT_NAME = "gen_ai.evaluation.result"


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

    def score(self, report: dict[str, Any]) -> float:
        """The highest risk of any span with visible text; the reasoning does not count.

        It is infinite if the risk of a span is not a finite number.
        """
        return highest(report["spans"], "risk")

    def label(self, report: dict[str, Any]) -> str | None:
        """``pass`` or ``fail``; ``None`` without a threshold."""
        if self.threshold is None:
            return None
        return "fail" if self.score(report) >= self.threshold else "pass"

    def explanation(self, report: dict[str, Any]) -> str:
        """What the score is, and the riskiest claim."""
        kind = SOURCES.get(report.get("risk_source") or "", "source unknown")
        score = f"highest risk of any span ({kind})"
        claims = measured_units(report["spans"], "risk", "claim") if self.explain else []
        riskiest = max(claims, key=lambda claim: claim["value"], default={})
        if "text" not in riskiest:  # a compact report has no texts
            return score
        return f"{score}; the riskiest claim is {riskiest['text'].strip()!r}"


def emit_event(
    scoring: Scoring,
    report: dict[str, Any],
    spans: Sequence[Span],
    *,
    response_id: str | None,
    provider: LoggerProvider | None,
) -> None:
    """Emit the ``gen_ai.evaluation.result`` event of an answer, in the context of the span of its call.

    Args:
        scoring: how the report becomes a score.
        report: the ``cocoa_risk`` report of the answer.
        spans: the OpenTelemetry spans of the call. Without one, the event belongs to the current span.
        response_id: the id of the answer, where it is known.
        provider: the provider of the logger; by default OpenTelemetry's global one.
    """
    if provider is None and not is_traced():
        return
    from opentelemetry._logs import LogRecord, get_logger_provider
    from opentelemetry.trace import set_span_in_context

    attributes = {
        "gen_ai.evaluation.name": scoring.name,
        "gen_ai.evaluation.score.value": finite(scoring.score(report)),
        "gen_ai.evaluation.score.label": scoring.label(report),
        "gen_ai.evaluation.explanation": scoring.explanation(report),
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": report.get("model_name"),
    }
    logger = (provider or get_logger_provider()).get_logger("cocoa_integrations", __version__)
    logger.emit(
        LogRecord(
            event_name=EVENT_NAME,
            attributes={name: value for name, value in attributes.items() if value is not None},
            context=set_span_in_context(spans[0]) if spans else None,
        )
    )
