"""The levels of risk that every rendering shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from cocoa_engine.spans import Span

LEVELS = 4
RAW = ("f_mlds", "con_mlds")
SMALLEST_SHOWN = 0.001  # risks are shown with three decimals, so the legend cannot show smaller differences
NARROWEST = 0.02  # least width of a relative scale, so that nearly equal risks are not drawn as far apart


@dataclass(frozen=True)
class RiskScale:
    """Maps a span's risk to the level, 0 to 3, that it is drawn at.

    Attributes:
        low, high: the range, divided into four equal steps.
        absolute: whether the range is the [0, 1] of a risk, or relative to the texts.
    """

    low: float
    high: float
    absolute: bool

    @classmethod
    def of(cls, spans: Iterable[Span]) -> RiskScale:
        """The scale of some spans: absolute, or relative if risks are a raw MLDS.

        A relative scale reaches from the lowest to the highest risk of the visible spans, because raw MLDS has no
        absolute scale: some models put every span near 0.9. A range below :data:`SMALLEST_SHOWN` is left
        empty. Other ranges are widened to at least :data:`NARROWEST`.
        """
        spans = [span for span in spans if span.text.strip()]
        if not any(span.risk_source in RAW for span in spans):
            return cls(0.0, 1.0, True)
        risks = [span.risk for span in spans if span.risk is not None] or [0.0]
        low, high = min(risks), max(risks)
        return cls(low, high if high - low < SMALLEST_SHOWN else max(high, low + NARROWEST), False)

    @property
    def empty(self) -> bool:
        """Whether the range is too small to be divided into levels."""
        return self.high - self.low < SMALLEST_SHOWN

    @property
    def bounds(self) -> list[float]:
        """The five bounds of the four levels."""
        step = (self.high - self.low) / LEVELS
        return [self.low + step * level for level in range(LEVELS + 1)]

    @property
    def ranges(self) -> list[str]:
        """The range of each level as text; no ranges if the scale is empty."""
        if self.empty:
            return []
        return [f"{low:.3f}–{high:.3f}" for low, high in pairwise(self.bounds)]

    def level(self, risk: float | None) -> int:
        """The level of a risk; always 0 if the scale is empty, or the risk was not measured."""
        return 0 if self.empty or risk is None else sum(risk >= bound for bound in self.bounds[1:-1])
