"""Fitting a calibrator on labelled spans, and validating it on prompts it has not seen. Needs scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cocoa_engine.errors import CalibrationError
from cocoa_engine.extras import need
from cocoa_engine.risk.calibrator import Estimate, Isotonic, RiskCalibrator, Rival, Settings, Validation
from cocoa_engine.risk.features import FEATURES
from cocoa_engine.risk.thresholds import Rule, choose
from cocoa_engine.risk.validation import brier, expected_calibration_error, reliability
from cocoa_engine.signal.ranking import Bootstrap, Interval, Ranked

Floats = NDArray[np.float64]

RIVALS = {
    "-min log p": ("min_log_prob", -1),
    "-mean log p": ("mean_log_prob", -1),
    "mean entropy": ("mean_entropy", 1),
    "first entropy": ("entropy", 1),
    "-first margin": ("margin", -1),
    "fMLDS": ("f_mlds", 1),
    "ConMLDS": ("con_mlds", 1),
}
"""What ranks spans by one feature alone, and with which sign."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Labelled spans.

    Attributes:
        features: ``[n, len(FEATURES)]``.
        labels: ``[n]``, whether each is hallucinated.
        groups: the prompt of each.
    """

    features: Floats
    labels: NDArray[np.bool_]
    groups: list[str]

    def only(self, chosen: NDArray[np.bool_]) -> LabelledFeatures:
        """Some of them."""
        groups = [group for group, kept in zip(self.groups, chosen, strict=True) if kept]
        return LabelledFeatures(self.features[chosen], self.labels[chosen], groups)


@dataclass(frozen=True)
class _Fit:
    means: Floats
    scales: Floats
    weights: Floats
    intercept: float
    isotonic: Isotonic | None

    def __call__(self, features: Floats) -> Floats:
        z = self.intercept + ((features - self.means) / self.scales) @ self.weights
        risks: Floats = 1 / (1 + np.exp(-np.clip(z, -700, 700)))
        if self.isotonic is None:
            return risks
        return np.interp(risks, self.isotonic.x, self.isotonic.y)


def fit(
    spans: LabelledFeatures,
    *,
    model_name: str,
    settings: Settings,
    data: str,
    unit: Literal["span", "answer"],
    isotonic: bool = False,
    folds: int = 5,
    draws: int = 1000,
    seed: int = 0,
    threshold: tuple[Rule, float] | None = None,
) -> RiskCalibrator:
    """Fit a calibrator on all spans; its validation figures come from folds of prompts that were left out in turn.

    Args:
        isotonic: an isotonic map on top of the logistic model, fitted on risks of spans that the latter has not seen.
        folds: of the cross-validation, grouped by prompt.
        draws: of the bootstrap, over prompts.
        threshold: a rule and its target. For ``"conformal"`` a third of the prompts is not fitted on, but chosen on;
            else the threshold is chosen on the left-out risks of the cross-validation.

    Raises:
        CalibrationError: there are fewer prompts than folds, or a fold would have spans of one class only.
        MissingExtraError: scikit-learn is not installed.
    """
    need("sklearn.linear_model", extra="risk", what="fitting a calibrator")
    prompts = list(dict.fromkeys(spans.groups))
    kept, chosen_on = spans, None
    if threshold and threshold[0] == "conformal":
        drawn = set(np.random.default_rng(seed).permutation(prompts)[: len(prompts) // 3].tolist())
        inside = np.array([group in drawn for group in spans.groups])
        kept, chosen_on = spans.only(~inside), spans.only(inside)
    _require(kept, folds)
    risks = left_out(kept, isotonic=isotonic, folds=folds)
    fitted = _fit(kept, isotonic=isotonic)
    chosen = None
    if threshold:
        on = kept if chosen_on is None else chosen_on
        chosen = choose(*threshold, risks if chosen_on is None else fitted(on.features), on.labels, on.groups)
    return RiskCalibrator(
        model_name=model_name,
        settings=settings,
        data=data,
        unit=unit,
        features=list(FEATURES),
        means=fitted.means.tolist(),
        scales=fitted.scales.tolist(),
        weights=fitted.weights.tolist(),
        intercept=fitted.intercept,
        isotonic=fitted.isotonic,
        validation=validate(kept, risks, folds=folds, draws=draws, seed=seed),
        threshold=chosen,
    )


def left_out(spans: LabelledFeatures, *, isotonic: bool, folds: int = 5) -> Floats:
    """Of each span, its risk by a fit on the prompts of the other folds, ``[n]``."""
    risks = np.empty(len(spans.labels))
    for rest, fold in _folds(spans, folds):
        risks[fold] = _fit(spans.only(rest), isotonic=isotonic)(spans.features[fold])
    return risks


def validate(spans: LabelledFeatures, risks: Floats, *, folds: int, draws: int, seed: int) -> Validation:
    """The figures of risks that were worked out for spans not fitted on, beside those of each rival."""
    bootstrap = Bootstrap(spans.groups, draws, seed)
    labels = spans.labels.astype(np.float64)

    def ranked(values: Floats) -> Ranked:
        return Ranked(values, labels, 1 - labels)

    own = ranked(risks)
    rivals = {}
    for name, (feature, sign) in RIVALS.items():
        rival = ranked(sign * spans.features[:, FEATURES.index(feature)])
        rivals[name] = Rival(
            auroc=_estimate(bootstrap.interval(rival, "auroc")),
            difference=_estimate(bootstrap.difference(own, rival, "auroc")),
        )
    curve = reliability(risks, labels)
    return Validation(
        folds=folds,
        prompts=len(set(spans.groups)),
        spans=len(labels),
        hallucinated=int(labels.sum()),
        auroc=_estimate(bootstrap.interval(own, "auroc")),
        auprc=_estimate(bootstrap.interval(own, "auprc")),
        brier=brier(risks, labels),
        brier_of_base_rate=brier(np.full(len(labels), labels.mean()), labels),
        ece=expected_calibration_error(curve),
        reliability=curve,
        rivals=rivals,
    )


def _fit(spans: LabelledFeatures, *, isotonic: bool) -> _Fit:
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler: Any = StandardScaler().fit(spans.features)
    model: Any = LogisticRegression(max_iter=1000).fit(scaler.transform(spans.features), spans.labels)
    plain = _Fit(scaler.mean_, scaler.scale_, model.coef_[0], float(model.intercept_[0]), None)
    if not isotonic:
        return plain
    unseen = left_out(spans, isotonic=False, folds=4)
    curve: Any = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(unseen, spans.labels)
    x, first = np.unique(curve.X_thresholds_, return_index=True)
    y = np.maximum.accumulate(np.clip(curve.y_thresholds_[first], 0, 1))
    return _Fit(plain.means, plain.scales, plain.weights, plain.intercept, Isotonic(x=x.tolist(), y=y.tolist()))


def _folds(spans: LabelledFeatures, folds: int) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Of each fold, which spans are in the rest and which in it; no prompt is in both."""
    from sklearn.model_selection import StratifiedGroupKFold

    splitter: Any = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=0)
    parts = []
    for _, fold in splitter.split(spans.features, spans.labels, spans.groups):
        inside = np.zeros(len(spans.labels), dtype=bool)
        inside[fold] = True
        parts.append((~inside, inside))
    return parts


def _require(spans: LabelledFeatures, folds: int) -> None:
    if not np.isfinite(spans.features).all():
        raise CalibrationError("a feature of a span is not finite; it cannot be fitted on.")
    # the isotonic map divides what is left of a fold into four again
    least = 2 * folds
    for what, chosen in (("hallucinated", spans.labels), ("supported", ~spans.labels)):
        prompts = len({group for group, is_one in zip(spans.groups, chosen, strict=True) if is_one})
        if prompts < least:
            raise CalibrationError(
                f"{prompts} prompts have {what} spans; {folds} folds of a cross-validation need at least {least}."
            )


def _estimate(interval: Interval) -> Estimate:
    return Estimate(**interval._asdict())
