"""The domain of a fitted risk: the features that it was fitted on, and the distance from which others are outside."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field, model_validator

from cocoa_engine.risk.packed import Floats32
from cocoa_engine.risk.part import Part

SHARE_INSIDE = 0.99
"""The share of the fitted items, left out of the fit of the domain, that the cut-off keeps inside."""


class Domain(Part):
    """An ellipsoid around the features of the fitted items.

    The squared distance of scaled features z is (z - c)' P (z - c) / k, with k features, their centre c and precision P
    (the inverse of their covariance), both of features cut at extreme quantiles. An item is outside if the distance is
    above the cut-off, which 99 % of the items stay below that were left out of the fit of c and P.

    Attributes:
        centre: c, ``[k]``.
        precision: P row by row, ``[k * k]``.
        cutoff: the largest squared distance inside the domain.
    """

    centre: Floats32
    precision: Floats32
    cutoff: float = Field(gt=0)

    @model_validator(mode="after")
    def _square(self) -> Domain:
        if not self.centre or len(self.precision) != len(self.centre) ** 2:
            raise ValueError("domain: the precision needs one row and one column for each feature")
        return self

    def distance(self, scaled: Sequence[float]) -> float:
        """The squared distance of scaled features ``[k]``; infinite if it cannot be computed."""
        count = len(self.centre)
        apart = [value - middle for value, middle in zip(scaled, self.centre, strict=True)]
        total = 0.0
        for row, difference in enumerate(apart):
            weights = self.precision[row * count : (row + 1) * count]
            total += difference * sum(weight * other for weight, other in zip(weights, apart, strict=True))
        return total / count if math.isfinite(total) else math.inf

    def is_outside(self, scaled: Sequence[float]) -> bool:
        """Whether scaled features ``[k]`` are outside the domain."""
        return self.distance(scaled) > self.cutoff
