"""The levels of risk that every form of drawing shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from cocoa_engine.spans import Span

LEVELS = 4
SHOWN = 0.001  # figures are shown to three decimals: below that, risks differ by rounding alone
NARROWEST = 0.02  # a relative scale: the riskiest of spans that are nearly alike is not painted as if it stood out


@dataclass(frozen=True)
class RiskScale:
    """Which level of risk, 0 to 3, a span's figure is shown at.

    Attributes:
        low, high: the range that is divided into four equal steps.
        calibrated: whether the range is the absolute [0, 1] of a calibrated risk, or that of the texts themselves.
    """

    low: float
    high: float
    calibrated: bool

    @classmethod
    def of(cls, spans: Iterable[Span]) -> RiskScale:
        """Absolute if every span's risk is calibrated, else from the lowest to the highest of those that can be seen.

        A relative range that is too small to matter is widened to :data:`NARROWEST`, or left empty.

        Raw MLDS has no absolute scale: some models put every span near 0.9.
        """
        spans = [span for span in spans if span.text.strip()]
        if spans and all(span.calibrated for span in spans):
            return cls(0.0, 1.0, True)
        risks = [span.risk for span in spans] or [0.0]
        low, high = min(risks), max(risks)
        return cls(low, high if high - low < SHOWN else max(high, low + NARROWEST), False)

    @property
    def empty(self) -> bool:
        """Whether the range is too small to be seen in its figures."""
        return self.high - self.low < SHOWN

    @property
    def bounds(self) -> list[float]:
        """The five ends of the four levels."""
        step = (self.high - self.low) / LEVELS
        return [self.low + step * level for level in range(LEVELS + 1)]

    @property
    def ranges(self) -> list[str]:
        """The four levels in figures; none if the range is empty."""
        if self.empty:
            return []
        return [f"{low:.3f}–{high:.3f}" for low, high in pairwise(self.bounds)]

    def level(self, risk: float) -> int:
        """The level of a risk; 0 for every risk if the range is empty."""
        return 0 if self.empty else sum(risk >= bound for bound in self.bounds[1:-1])
