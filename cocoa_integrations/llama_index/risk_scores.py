"""The risk of each answer as a score in OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent

from cocoa_integrations._shared.scores import SCORE_NAME, Scoring, emit_event
from cocoa_integrations.llama_index.events import CocoaRiskEvent

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider


class RiskScores(BaseEventHandler):
    """Emits the risk of every answer as an OpenTelemetry event ``gen_ai.evaluation.result``.

    The event belongs to the span that an instrumentation has started for the LLM call, or else to the current span. It
    has ``gen_ai.evaluation.name``, ``gen_ai.evaluation.score.value`` (the highest risk of any span),
    ``gen_ai.evaluation.explanation``, ``gen_ai.response.model`` and, with a threshold,
    ``gen_ai.evaluation.score.label``.

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

    @classmethod
    def class_name(cls) -> str:
        """The name of the handler."""
        return "RiskScores"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Emit the score of a complete answer."""
        if isinstance(event, CocoaRiskEvent):
            spans, provider = event.opentelemetry_spans, self._logger_provider
            emit_event(self._scoring, event.report, spans, response_id=None, provider=provider)
