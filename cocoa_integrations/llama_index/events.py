"""LlamaIndex instrumentation events of our own: each span as it is decided, and the risk of each whole answer.

LlamaIndex swallows what an event handler raises, so a handler can watch but not stop an answer.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent

from cocoa_engine import Generation, Span


class CocoaSpanEvent(BaseEvent):
    """A span was decided; while streaming, it is sent before the span's text is handed out.

    The inherited ``span_id`` names the instrumentation span of the LLM call, which the spans of one answer and its
    :class:`CocoaRiskEvent` share.
    """

    number: int
    span: Span

    @classmethod
    def class_name(cls) -> str:
        """The event's name in handlers and exports."""
        return "CocoaSpanEvent"


class CocoaRiskEvent(BaseEvent):
    """An answer is complete: exactly one per generation, however it was asked for.

    A generation that fails, is cancelled or is abandoned midway has no whole answer, hence no such event.
    """

    report: dict[str, Any]
    generation: Generation

    @classmethod
    def class_name(cls) -> str:
        """The event's name in handlers and exports."""
        return "CocoaRiskEvent"
