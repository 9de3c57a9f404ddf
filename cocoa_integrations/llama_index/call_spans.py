"""The OpenTelemetry spans that instrumentations of LlamaIndex start for a call.

They are span handlers of LlamaIndex's dispatcher, and store an OpenTelemetry span for each of LlamaIndex's span ids.
Those that make it current do so only until the call returns, which is before a stream is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from llama_index.core.instrumentation.dispatcher import Dispatcher  # type: ignore[attr-defined]

from cocoa_integrations._shared.tracing import is_traced, span_in

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_MAPPINGS = ("all_spans", "open_spans")
"""Attributes in which span handlers store spans by their id: the first is that of llama-index-observability-otel, the
second that of OpenInference and OpenLLMetry."""

_SPAN = ("_otel_span", "otel_span")
"""Attributes of LlamaIndex spans that have the OpenTelemetry span."""


def spans_of_call(dispatcher: Dispatcher, span_id: str | None) -> list[Span]:
    """The OpenTelemetry spans of a call.

    Args:
        dispatcher: the dispatcher of the caller; its parents are included.
        span_id: the id of LlamaIndex's span of the call.
    """
    if span_id is None or not is_traced():
        return []
    return list(_spans(dispatcher, span_id))


def _spans(dispatcher: Dispatcher, span_id: str) -> Iterator[Span]:
    while True:
        for handler in dispatcher.span_handlers:
            for name in _MAPPINGS:
                stored = getattr(handler, name, None)
                record = stored.get(span_id) if isinstance(stored, Mapping) else None
                if (span := span_in(record, _SPAN)) is not None:
                    yield span
                    break
        if not dispatcher.propagate:
            return
        dispatcher = dispatcher.parent
