"""The levels of risk that every rendering shares. They are the same in every view of every answer of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from cocoa_engine.risk import LOWEST_SHADE
from cocoa_engine.spans import RAW, Span

__all__ = ["BOUNDS", "LEVELS", "RAW", "RiskScale"]

BOUNDS = (0.0, LOWEST_SHADE, 0.5, 0.75, 1.0)
LEVELS = len(BOUNDS) - 1


@dataclass(frozen=True)
class RiskScale:
    """Maps a risk to the level, 0 to 3, that it is drawn at.

    Attributes:
        absolute: whether the risks are in [0, 1]. A raw MLDS has no levels: its range depends on the model.
    """

    absolute: bool = True

    @classmethod
    def of(cls, spans: Iterable[Span]) -> RiskScale:
        """The scale of some spans; without levels if any risk is a raw MLDS."""
        return cls(not any(span.risk_source in RAW for span in spans))

    @property
    def ranges(self) -> list[str]:
        """The range of each level as text; no ranges without levels."""
        return [f"{low:.2f}–{high:.2f}" for low, high in pairwise(BOUNDS)] if self.absolute else []

    def level(self, risk: float | None) -> int:
        """The level of a risk; 0 if it was not measured, or there are no levels. NaN has the highest level."""
        if risk is None or not self.absolute:
            return 0
        return sum(not risk < bound for bound in BOUNDS[1:-1])
