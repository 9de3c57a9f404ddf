"""A fitted risk, its domain, probe and validation: the parts of a calibrator's file. Plain Python."""

from __future__ import annotations

import math
import operator
import struct
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from cocoa_engine.errors import CalibrationError
from cocoa_engine.risk.features import PROBE_FEATURE, SOURCE_FEATURES


class Part(BaseModel):
    """A part of a calibrator's file. It is not changed, and has no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _decoded(value: Any) -> Any:
    """The numbers of base64 text; another value as it is."""
    if not isinstance(value, str):
        return value
    try:
        data = b64decode(value, validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, struct.error) as error:
        raise ValueError(f"it is not base64 of float32 numbers: {error}") from None


def _rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    numbers = tuple(array("f", values))
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number is infinite or NaN")
    return numbers


def _write(values: Sequence[float]) -> str:
    return b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")


Floats32 = Annotated[
    tuple[float, ...], BeforeValidator(_decoded), AfterValidator(_rounded), PlainSerializer(_write, when_used="json")
]
"""A tuple of finite numbers, rounded to float32; base64 in JSON."""


class Probe(Part):
    """The direction of a layer's states that separates hallucinated from supported spans, or wrong from right answers.

    score = w . H[S, l] + b, where H[S, l] is the mean state of its tokens after layer l. After SAPLMA (Azaria and
    Mitchell, 2023) and probes of hallucinated entities (Obeso et al., 2025).

    Attributes:
        layer: l; layer 0 is the embedding.
        model_name: the model that it was fitted on. The states of another model have other directions.
        dtype: the data type of that model's weights, such as ``"float32"``.
        weights: w, ``[d]``.
        intercept: b.
    """

    layer: int = Field(ge=0)
    model_name: str
    dtype: str
    weights: Floats32 = Field(min_length=1)
    intercept: float

    @model_validator(mode="after")
    def _finite(self) -> Probe:
        if max(map(abs, (*self.weights, self.intercept))) > STEEPEST:
            raise ValueError(f"a weight of the probe is above {STEEPEST:g}: the risk would not be finite")
        return self


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

    def is_outside(self, scaled: Sequence[float]) -> bool:
        """Whether scaled features ``[k]`` are outside the domain, or so far that the distance cannot be computed."""
        apart = [value - middle for value, middle in zip(scaled, self.centre, strict=True)]
        products = (difference * other for difference in apart for other in apart)
        return not sum(map(operator.mul, self.precision, products)) / len(apart) <= self.cutoff


class Estimate(Part):
    """An estimate with its 95 % bootstrap interval over prompts."""

    estimate: float
    low: float
    high: float


class Baseline(Part):
    """A baseline that needs no fit: its AUROC, and the calibrated risk's AUROC minus that."""

    auroc: Estimate
    difference: Estimate


class ReliabilityBin(Part):
    """Items of similar risk: their number, their mean risk, and the share of them that is hallucinated."""

    items: int
    mean_risk: float
    share_hallucinated: float


class Validation(Part):
    """The quality of the risk on prompts that it was not fitted on, by grouped cross-validation.

    AUROC and AUPRC, also those of the baselines (``rivals``), compare items of the same fold only, because the risks of
    two folds come from two fits.
    """

    folds: int = Field(description="Folds of the cross-validation; 0 if the risk was fitted on other data.")
    repeats: int = Field(
        1, description="How often the prompts were divided into folds; the values cover all divisions."
    )
    prompts: int
    items: int = Field(description="Spans, or answers as wholes.")
    hallucinated: int
    auroc: Estimate
    auprc: Estimate
    brier: float = Field(description="Mean squared error of the risk.")
    brier_of_base_rate: float = Field(description="The same for a constant risk, the share of hallucinated items.")
    ece: float = Field(description="Expected calibration error over the reliability bins.")
    reliability: list[ReliabilityBin]
    rivals: dict[str, Baseline]

    @property
    def division(self) -> str:
        """A description of the folds; empty if the risk was fitted on other data."""
        again = f", divided {self.repeats} times" if self.repeats > 1 else ""
        return f"{self.folds} folds of prompts{again}" if self.folds else ""


Rule = Literal["precision", "recall", "specificity", "conformal"]
"""How a threshold is chosen."""

PROBABILITY_THRESHOLD = 0.5
"""The risk from which spans and answers are flagged by a calibrator without a threshold of its own."""

LARGEST = 1e6
"""Features are cut to this absolute value. Those that are measured are far below it, unless they are infinite."""

STEEPEST = 1e6
"""The largest intercept, weight of an unscaled feature, and weight of a probe. Those that are fitted are far below."""


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
        if after in (0, len(self.x)):
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

    Its validation is on prompts that it was not fitted on. Its threshold is the risk from which items are flagged, if
    one was chosen.
    """

    data: str = Field(description="A description of the data it was fitted on.")
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
        """The risk of an item with these features, in the order of :attr:`features`."""
        z = self.intercept + sum(map(operator.mul, self.weights, self._scaled(features)))
        power = math.exp(-abs(z))  # does not overflow
        risk = (1 if z >= 0 else power) / (1 + power)
        return self.isotonic(risk) if self.isotonic else risk

    def is_out_of_domain(self, features: Sequence[float]) -> bool:
        """Whether an item with these features is unlike those that the risk was fitted on."""
        return self.domain is not None and self.domain.is_outside(self._scaled(features))

    def _scaled(self, features: Sequence[float]) -> list[float]:
        """(x_k - mean_k) / scale_k of each feature, with x_k cut to :data:`LARGEST`."""
        scaled = []
        for name, value, mean, scale in zip(self.features, features, self.means, self.scales, strict=True):
            if math.isnan(value):
                raise CalibrationError(_MISSING.get(name, f"the feature {name} is not a number (NaN)."))
            scaled.append((min(max(value, -LARGEST), LARGEST) - mean) / scale)
        return scaled


def threshold_of(fitted: FittedRisk) -> float:
    """The threshold that was chosen with the fit; otherwise 0.5, from which an error is more likely than not."""
    return PROBABILITY_THRESHOLD if fitted.threshold is None else fitted.threshold.value


_MISSING = {
    **dict.fromkeys(
        SOURCE_FEATURES,
        "the source attention was not measured, and this calibrator needs it: measure with an engine that has this "
        "calibrator, and with a model whose attention can be seen.",
    ),
    PROBE_FEATURE: "the probe was not measured: measure with an engine that has this calibrator.",
}
"""Messages for features that may be missing."""
