"""LlamaIndex instrumentation events: one for each decided span, and one for the risk of each complete answer.

LlamaIndex suppresses exceptions of event handlers, so a handler can observe an answer but not stop it.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.events import BaseEvent

from cocoa_engine import Generation, Span


class CocoaSpanEvent(BaseEvent):
    """A span was decided. In a stream, the event is sent before the text of the span is yielded.

    The inherited ``span_id`` is the id of the instrumentation span of the LLM call. All events of one answer share it.
    """

    number: int
    span: Span

    @classmethod
    def class_name(cls) -> str:
        """The name of the event in handlers and exports."""
        return "CocoaSpanEvent"


class CocoaRiskEvent(BaseEvent):
    """An answer is complete. There is exactly one event per generation, for every kind of call.

    A generation that fails, is cancelled or is abandoned has no complete answer and sends no such event.
    """

    report: dict[str, Any]
    generation: Generation
    opentelemetry_spans: list[Any] = Field(default_factory=list, exclude=True, repr=False)
    """The OpenTelemetry spans of the call. They are not part of exports."""

    @classmethod
    def class_name(cls) -> str:
        """The name of the event in handlers and exports."""
        return "CocoaRiskEvent"
