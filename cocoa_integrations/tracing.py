"""Risk as attributes of OpenTelemetry spans.

Nothing has to be switched on: an answer's risk is written to the OpenTelemetry span that was current where the answer
was asked for, if that span still records when the answer is complete. Without OpenTelemetry in the process this costs
one look into ``sys.modules``; the package itself needs ``opentelemetry-api`` only (extra ``tracing``).

==========================  ===================================================================
``cocoa.max_risk``          the highest risk of any text span of any answer
``cocoa.mean_risk``         the mean risk over the text spans of all answers
``cocoa.risk_points``       the number of risk points in all answers
``cocoa.calibrated``        whether all these risks are calibrated
``cocoa.answers``           the number of answers
==========================  ===================================================================

"All answers" are those asked for under the same OpenTelemetry span: with an instrumentation that opens one per model
call it is one, in a span around a whole chain or query engine it is every one of that chain. Only the innermost span is
written to. An answer taken from a LangChain cache is not decoded and adds nothing; neither does one broken off.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cocoa_engine import Generation

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass
class _Totals:
    """The risks under one OpenTelemetry span so far."""

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

    def attributes(self) -> dict[str, Any]:
        return {
            "cocoa.max_risk": self.max_risk,
            "cocoa.mean_risk": self.sum_risk / self.spans if self.spans else 0.0,
            "cocoa.risk_points": self.risk_points,
            "cocoa.calibrated": self.calibrated,
            "cocoa.answers": self.answers,
        }


_totals: WeakKeyDictionary[Span, _Totals] = WeakKeyDictionary()  # a span's attributes cannot be read back
_guard = threading.Lock()


class RiskTrace:
    """Writes the risk of answers to the OpenTelemetry span that is current when this is made; make it inside the call.

    The span is kept because a stream may be read to its end in another context or thread.
    """

    def __init__(self) -> None:
        self._span: Span | None = None
        if "opentelemetry.trace" in sys.modules:  # whoever has a span has imported it
            from opentelemetry.trace import get_current_span

            self._span = get_current_span()

    def record(self, generation: Generation) -> None:
        """Add a whole answer."""
        if self._span is None or not self._span.is_recording():
            return
        with _guard:  # the calls of a batch share the caller's span
            totals = _totals.setdefault(self._span, _Totals())
            totals.add(generation)
            self._span.set_attributes(totals.attributes())
