"""Risk as attributes of OpenTelemetry spans; :mod:`cocoa_integrations.tracing` lists the attributes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cocoa_engine import Generation
from cocoa_engine.forks import free_in_child
from cocoa_integrations._shared.finite import severity

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass
class _Totals:
    """The risk of all answers under one OpenTelemetry span."""

    max_risk: float = 0.0
    sum_risk: float = 0.0
    spans: int = 0
    risk_points: int = 0
    answers: int = 0
    calibrated: bool = True

    def add(self, generation: Generation) -> None:
        self.max_risk = max(self.max_risk, severity(generation.max_risk))
        risks = [span.risk for span in generation.spans if span.risk is not None]
        self.sum_risk += sum(risks)
        self.spans += len(risks)
        self.risk_points += sum(span.kind == "risk_point" for span in generation.spans)
        self.answers += 1
        self.calibrated &= generation.calibrated

    def attributes(self) -> dict[str, float | int | bool]:
        return {
            "cocoa.max_risk": self.max_risk,
            "cocoa.mean_risk": self.sum_risk / self.spans if self.spans else 0.0,
            "cocoa.risk_points": self.risk_points,
            "cocoa.calibrated": self.calibrated,
            "cocoa.answers": self.answers,
        }


_totals: WeakKeyDictionary[Span, _Totals] = WeakKeyDictionary()  # the attributes of a span cannot be read back
_lock = free_in_child(threading.Lock())


def is_traced() -> bool:
    """Whether this process has imported OpenTelemetry. Otherwise there can be no span."""
    return "opentelemetry.trace" in sys.modules


def span_in(record: Any, attributes: Iterable[str]) -> Span | None:
    """The OpenTelemetry span that an instrumentation stores for a call, or ``None``.

    Args:
        record: the span itself, or an object that has it.
        attributes: the names under which such an object may have it.
    """
    from opentelemetry.trace import Span

    for candidate in (record, *(getattr(record, name, None) for name in attributes)):
        if isinstance(candidate, Span):
            return candidate
    return None


class RiskTrace:
    """Writes the risk of answers to OpenTelemetry spans.

    Create it inside the call. The spans are stored because a stream may be read in another context or thread.

    Args:
        spans: the spans that instrumentations have started for this call of the model. Many instrumentations start
            them in callbacks, without making them current. Default: the current span.

    Attributes:
        spans: the spans that are written to.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = list(spans)
        if not self.spans and is_traced():
            from opentelemetry.trace import get_current_span

            self.spans = [get_current_span()]

    def record(self, generation: Generation) -> None:
        """Add a complete answer."""
        for span in self.spans:
            if span.is_recording():
                with _lock:  # the calls of a batch may run under the same span
                    totals = _totals.setdefault(span, _Totals())
                    totals.add(generation)
                    span.set_attributes(totals.attributes())
