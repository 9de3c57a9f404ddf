"""From features to a risk in [0, 1], with fitted weights. Plain Python."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from cocoa_engine.errors import CalibrationError
from cocoa_engine.risk.domain import Domain
from cocoa_engine.risk.features import PROBE_FEATURE, SOURCE_FEATURES
from cocoa_engine.risk.part import Part
from cocoa_engine.risk.validation import Validation

Rule = Literal["precision", "recall", "specificity", "conformal"]
"""How a threshold is chosen."""

PROBABILITY_THRESHOLD = 0.5
"""The risk from which spans and answers are flagged by a calibrator without a threshold of its own."""

LARGEST = 1e6
"""Features are cut to this absolute value. Those that are measured are far below it, unless they are infinite."""

STEEPEST = 1e6
"""The largest intercept, and the largest weight of an unscaled feature. Those that are fitted are far below it."""


class Isotonic(Part):
    """A non-decreasing map from [0, 1] to [0, 1]: linear between its knots, constant outside them."""

    x: list[float]
    y: list[float]

    @model_validator(mode="after")
    def _monotone(self) -> Isotonic:
        rising = all(a < b for a, b in zip(self.x, self.x[1:], strict=False))
        if len(self.x) != len(self.y) or not self.x or not rising or sorted(self.y) != self.y:
            raise ValueError("isotonic: x must increase, y must not decrease, and both must have the same length")
        if not 0 <= self.y[0] <= self.y[-1] <= 1:
            raise ValueError("isotonic: y must be in [0, 1]")
        return self

    def __call__(self, value: float) -> float:
        after = bisect_right(self.x, value)
        if after == 0 or after == len(self.x):
            return self.y[0 if after == 0 else -1]
        x0, x1, y0, y1 = self.x[after - 1], self.x[after], self.y[after - 1], self.y[after]
        return min(max(y0 + (y1 - y0) * (value - x0) / (x1 - x0), y0), y1)


class Threshold(Part):
    """The risk from which an item is flagged, and the rule and target that it was chosen by."""

    value: float = Field(ge=0, le=math.nextafter(1, 2), description="Above 1, it flags nothing.")
    rule: Rule
    target: float
    precision: float | None = Field(description="Precision on the items it was chosen on; `None` if none is flagged.")
    recall: float
    prompts: int


class FittedRisk(Part):
    """A risk in [0, 1]: a logistic model of some features, optionally followed by an isotonic map.

    risk = g(1 / (1 + e^-z)), with z = b + sum_k w_k (x_k - mean_k) / scale_k, and g the isotonic map or the identity.

    Attributes:
        data: a description of the data it was fitted on.
        domain: which features are like those that it was fitted on.
        validation: how well it does on prompts that it was not fitted on.
        threshold: the risk from which items are flagged, if one was chosen.
    """

    data: str
    features: list[str]
    means: list[float]
    scales: list[float]
    weights: list[float]
    intercept: float
    isotonic: Isotonic | None = None
    domain: Domain | None = None
    validation: Validation
    threshold: Threshold | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> FittedRisk:
        if not len(self.features) == len(self.means) == len(self.scales) == len(self.weights):
            raise ValueError("features, means, scales and weights must have the same length")
        if min(self.scales, default=1) <= 0:
            raise ValueError("scales must be above 0")
        if self.domain is not None and len(self.domain.centre) != len(self.features):
            raise ValueError("domain: the centre must have a number for each feature")
        largest = steepest = abs(self.intercept)
        for weight, mean, scale in zip(self.weights, self.means, self.scales, strict=True):
            steepest = max(steepest, abs(weight) / scale)
            largest += abs(weight) * ((LARGEST + abs(mean)) / scale)
        if not math.isfinite(largest):
            raise ValueError("a weight, mean or intercept is too large, or a scale too small, for a finite risk")
        if steepest > STEEPEST:
            raise ValueError(
                f"the intercept and each weight / scale are at most {STEEPEST:g}: the risk would be constant"
            )
        return self

    def __call__(self, features: Sequence[float]) -> float:
        """The risk of an item with these features, in the order of :attr:`features`.

        Raises:
            CalibrationError: a feature was not measured, or is NaN.
        """
        weighted = zip(self.weights, self._scaled(features), strict=True)
        risk = logistic(self.intercept + sum(weight * value for weight, value in weighted))
        return self.isotonic(risk) if self.isotonic else risk

    def is_out_of_domain(self, features: Sequence[float]) -> bool:
        """Whether an item with these features is unlike those that the risk was fitted on.

        Raises:
            CalibrationError: a feature was not measured, or is NaN.
        """
        return self.domain is not None and self.domain.is_outside(self._scaled(features))

    def _scaled(self, features: Sequence[float]) -> list[float]:
        """(x_k - mean_k) / scale_k of each feature, with x_k cut to :data:`LARGEST`."""
        known = zip(self.features, features, self.means, self.scales, strict=True)
        scaled = []
        for name, value, mean, scale in known:
            if math.isnan(value):
                raise CalibrationError(_MISSING.get(name, f"the feature {name} is not a number (NaN)."))
            scaled.append((min(max(value, -LARGEST), LARGEST) - mean) / scale)
        return scaled

    def flags(self, features: Sequence[float]) -> bool:
        """Whether the risk reaches the threshold, or is no number (NaN).

        Raises:
            CalibrationError: no threshold was chosen.
        """
        if self.threshold is None:
            raise CalibrationError("this calibrator has no threshold; choose one when you fit it.")
        return not self(features) < self.threshold.value


def threshold_of(fitted: FittedRisk) -> float:
    """The threshold that was chosen with the fit; otherwise 0.5, from which an error is more likely than not."""
    return PROBABILITY_THRESHOLD if fitted.threshold is None else fitted.threshold.value


_MISSING = {
    **dict.fromkeys(
        SOURCE_FEATURES,
        "the source attention was not measured, and this calibrator needs it: measure with an engine that has this "
        "calibrator, and with a model whose attention can be seen.",
    ),
    PROBE_FEATURE: "the span has no value of the probe: measure it with an engine that has this calibrator.",
}
"""Messages for features that may be missing."""


def logistic(z: float) -> float:
    """1 / (1 + e^-z), without overflow."""
    if z >= 0:
        return 1 / (1 + math.exp(-z))
    power = math.exp(z)
    return power / (1 + power)
