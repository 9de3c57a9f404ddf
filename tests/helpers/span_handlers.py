"""OpenTelemetry SDKs that keep what they export in memory, and instrumentations that use them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


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
