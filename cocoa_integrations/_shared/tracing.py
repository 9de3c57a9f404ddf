"""Risk as attributes of OpenTelemetry spans; :mod:`cocoa_integrations.tracing` lists the attributes."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cocoa_engine import Generation

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
        self.max_risk = max(self.max_risk, generation.max_risk)
        self.sum_risk += sum(span.risk for span in generation.spans)
        self.spans += len(generation.spans)
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
_lock = threading.Lock()


class RiskTrace:
    """Writes the risk of answers to the OpenTelemetry span that is current when this object is created.

    Create it inside the call. The span is stored because a stream may be read in another context or thread.
    """

    def __init__(self) -> None:
        self._span: Span | None = None
        if "opentelemetry.trace" in sys.modules:  # otherwise no span can be current
            from opentelemetry.trace import get_current_span

            self._span = get_current_span()

    def record(self, generation: Generation) -> None:
        """Add a complete answer."""
        if self._span is None or not self._span.is_recording():
            return
        with _lock:  # the calls of a batch run under the same span
            totals = _totals.setdefault(self._span, _Totals())
            totals.add(generation)
            self._span.set_attributes(totals.attributes())
