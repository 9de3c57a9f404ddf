"""Instrumentations that start OpenTelemetry spans in callbacks, without making them current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from opentelemetry.context import Context
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, Tracer


class Spans:
    """An SDK whose finished spans stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("tests")

    def with_risk(self) -> list[tuple[str, dict[str, Any]]]:
        """The name and the risk attributes of every finished span that has some."""
        found = []
        for span in self.exporter.get_finished_spans():
            risk = {name: value for name, value in (span.attributes or {}).items() if name.startswith("cocoa.")}
            if risk:
                found.append((span.name, risk))
        return found


@dataclass
class Record:
    """What langchain-azure-ai stores for a run."""

    span: Span


class AzureLike(BaseCallbackHandler):
    """Starts and stores spans as ``AzureAIOpenTelemetryTracer`` of langchain-azure-ai does, which needs Azure's SDK."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[str, Record] = {}

    def _start(self, name: str, run_id: UUID) -> None:
        self._spans[str(run_id)] = Record(self._tracer.start_span(name, context=Context()))

    def _end(self, run_id: UUID) -> None:
        self._spans.pop(str(run_id)).span.end()

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._start("chain", run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._start("model", run_id)

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._start("model", run_id)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)


class Events:
    """An SDK whose log records stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemoryLogRecordExporter()
        self.provider = LoggerProvider()
        self.provider.add_log_record_processor(SimpleLogRecordProcessor(self.exporter))

    def records(self) -> list[Any]:
        """The log records of OpenTelemetry's API, in order."""
        return [finished.log_record for finished in self.exporter.get_finished_logs()]


@contextmanager
def instrumented(package: str, instrumentor: str, spans: Spans) -> Iterator[None]:
    """Use an instrumentor of OpenInference inside the context; skips the test if its package is not installed."""
    made = getattr(pytest.importorskip(package), instrumentor)()
    made.instrument(tracer_provider=spans.provider, skip_dep_check=True)
    yield
    made.uninstrument()
