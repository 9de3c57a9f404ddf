"""Fitting a risk on labelled spans or answers, and validating it on unseen prompts. Needs scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from cocoa_engine.arguments import SettingsModel
from cocoa_engine.errors import CalibrationError, CocoaError
from cocoa_engine.lab.ranking import Bootstrap, Interval, Ranked
from cocoa_engine.lab.thresholds import brier, choose, expected_calibration_error, reliability, require
from cocoa_engine.optional import need
from cocoa_engine.risk.features import PROBE_FEATURE
from cocoa_engine.risk.fitted import (
    SHARE_INSIDE,
    Baseline,
    Domain,
    Estimate,
    FittedRisk,
    Isotonic,
    Probe,
    Rule,
    Validation,
)

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Folds = list[tuple[NDArray[np.intp], NDArray[np.intp]]]
"""For each fold, the numbers of the other items and of its own."""

STRENGTHS = (0.1, 1.0, 10.0)
"""Strengths of the ridge penalty on standardised states, for each span. Every fit selects one of them."""

FOLDS = 5
"""Folds of the cross-fit. With fewer prompts of a class, there are as many folds as such prompts, and at least 2."""


class Direction(NamedTuple):
    """A direction of hidden states: the score of a span is w . h + b, with its mean state h.

    Attributes:
        weights: w, ``[d]``.
        intercept: b.
    """

    weights: Floats
    intercept: float


def scores_of(direction: Direction | Probe, states: Floats32) -> Floats:
    """The score of each span, ``[n]``, from ``[n, d]``."""
    scores: Floats = states.astype(np.float64) @ np.array(direction.weights) + direction.intercept
    return scores


def fit_direction(states: Floats32, labels: NDArray[np.bool_], folds: Folds) -> tuple[Direction, Floats]:
    """Fit a direction on all spans, and score each span by a direction that was fitted without its prompt.

    What is fitted on top of the scores must use the cross-fitted ones: a direction of hundreds of numbers separates the
    spans that it was fitted on too well.

    Args:
        states: the mean hidden states, ``[n, d]``.
        labels: whether each span is hallucinated, ``[n]``.
        folds: divides the spans by prompt.

    Returns:
        The direction, and the cross-fitted scores, ``[n]``.
    """
    mean, scale = states.mean(axis=0), states.std(axis=0)
    scale[scale == 0] = 1
    scaled, y = (states - mean) / scale, labels.astype(np.float64)
    sums = [_Sums.of(scaled[fold], y[fold]) for _, fold in folds]
    total = _Sums(*(np.sum(column, axis=0) for column in zip(*sums, strict=True)))
    scores = np.empty((len(STRENGTHS), len(labels)))
    for number, strength in enumerate(STRENGTHS):
        for (_, fold), own in zip(folds, sums, strict=True):
            others = _Sums(*(all_rows - rows for all_rows, rows in zip(total, own, strict=True)))
            scores[number, fold] = scores_of(others.ridge(strength), scaled[fold])
    best = int(np.argmin(((scores - y) ** 2).mean(axis=1)))
    ridge = total.ridge(STRENGTHS[best])
    weights = ridge.weights / scale
    return Direction(weights, ridge.intercept - float(weights @ mean)), scores[best]


class _Sums(NamedTuple):
    """What a ridge regression needs to know of n rows. Sums of folds add up, so each product is computed once."""

    count: Any  # n
    squares: Floats  # X'X, [d, d]
    states: Floats  # the sum of the rows of X, [d]
    products: Floats  # X'y, [d]
    labels: Any  # the sum of y

    @classmethod
    def of(cls, x: Floats32, y: Floats) -> _Sums:
        wide = x.astype(np.float64)
        return cls(len(y), (x.T @ x).astype(np.float64), wide.sum(axis=0), y @ wide, y.sum())

    def ridge(self, strength: float) -> Direction:
        """argmin_w,b |Xw + b - y|^2 + strength * n * |w|^2."""
        covariance = self.squares - np.outer(self.states, self.states) / self.count
        penalty = strength * self.count * np.eye(len(self.states))
        weights = np.linalg.solve(covariance + penalty, self.products - self.states * (self.labels / self.count))
        return Direction(weights, float((self.labels - weights @ self.states) / self.count))


CUT = 0.005
"""Before centre and covariance are estimated, each feature is cut at this quantile on either side."""

JITTER = 0.01
"""Added to the variance of each scaled feature, so that features which determine one another can be inverted."""


def fit_domain(scaled: Floats, folds: Folds) -> Domain:
    """Fit the ellipsoid on all items. Its cut-off is of items that were left out of the fit.

    Args:
        scaled: the scaled features, ``[n, k]``.
        folds: folds of the items.
    """

    def ellipsoid(inside: Floats) -> tuple[Floats, Floats]:
        """The centre, ``[k]``, and the precision, ``[k, k]``."""
        cut = np.clip(inside, *np.quantile(inside, [CUT, 1 - CUT], axis=0))
        covariance = np.atleast_2d(np.cov(cut, rowvar=False)) + JITTER * np.eye(scaled.shape[1])
        return cut.mean(axis=0), np.linalg.inv(covariance).astype(np.float64)

    distances = []  # squared, as Domain.distance
    for rest, fold in folds:
        centre, precision = ellipsoid(scaled[rest])
        apart = scaled[fold] - centre
        distances.append(np.einsum("nk,kl,nl->n", apart, precision, apart) / scaled.shape[1])
    centre, precision = ellipsoid(scaled)
    return Domain(
        centre=tuple(centre.tolist()),
        precision=tuple(precision.ravel().tolist()),
        cutoff=float(np.quantile(np.concatenate(distances), SHARE_INSIDE)),
    )


Columns = Mapping[str, Floats]

MAX_REPEATS, ENOUGH_RISKS = 5, 20_000
"""With few items, the validation depends on how they are divided into folds. The division is therefore repeated until
there are ENOUGH_RISKS out-of-fold risks, at most MAX_REPEATS times."""

BASELINES: dict[str, Callable[[Columns], Floats]] = {
    "-log p": lambda x: -x["mean_log_prob"] * np.exp(x["log_tokens"]),
    "-mean log p": lambda x: -x["mean_log_prob"],
    "-min log p": lambda x: -x["min_log_prob"],
    "mean entropy": lambda x: x["mean_entropy"],
    "-mean margin": lambda x: -x["mean_margin"],
    "fMLDS": lambda x: x["f_mlds"],
    "ConMLDS": lambda x: x["con_mlds"],
    "-source attention": lambda x: -x["source_attention"],
}
"""Scores that rank spans or answers without a fit: common single-pass uncertainty scores, both MLDS, and the source
attention if it was measured."""


class FitSettings(SettingsModel, frozen=True):
    """How a calibrator is fitted and validated.

    Attributes:
        probe: also fit a probe, a direction of the model's hidden states, on labelled parts of answers. It improves the
            risk of spans of answers like these, and makes it worse on others.
        isotonic: add an isotonic map after the logistic model, fitted on out-of-fold risks.
        threshold: the rule and target of the threshold of the risk: ``"precision"``, ``"recall"``, ``"specificity"``
            (the share of supported items that are not flagged) or ``"conformal"`` (the share that may be missed), such
            as ``("recall", 0.8)``. A conformal threshold is chosen on a third of the prompts, which are then excluded
            from the fit. The others are chosen on the out-of-fold risks.
        folds: folds of the cross-validation, grouped by prompt. With few items, the division is repeated.
        draws: number of bootstrap draws over prompts.
        seed: seed of the bootstrap, and of the prompts that a conformal threshold is chosen on.

    Raises:
        CalibrationError: one of them is out of range.
    """

    _invalid: ClassVar[type[CocoaError]] = CalibrationError
    _what: ClassVar[str] = "setting of a fit"

    probe: bool = False
    isotonic: bool = False
    threshold: tuple[Rule, float] | None = None
    folds: int = Field(5, ge=2)
    draws: int = Field(1000, ge=1)
    seed: int = 0

    @field_validator("threshold")
    @classmethod
    def _reachable(cls, threshold: tuple[Rule, float] | None) -> tuple[Rule, float] | None:
        if threshold is not None:
            require(*threshold)
        return threshold


DEFAULTS = FitSettings()


@dataclass(frozen=True)
class LabelledFeatures:
    """Labelled items: spans, or whole answers.

    Attributes:
        names: the names of the features.
        features: ``[n, len(names)]``.
        labels: whether each item is hallucinated, ``[n]``.
        groups: the prompt of each item.
        states: the mean hidden state of each span, ``[n, d]``, for a probe; `None` for a fit without a probe.
        sets: the number of each item's data set, ``[n]``; `None` if all are of one.
    """

    names: Sequence[str]
    features: Floats
    labels: NDArray[np.bool_]
    groups: list[str]
    states: Floats32 | None = None
    sets: NDArray[np.intp] | None = None

    def only(self, chosen: NDArray[Any]) -> LabelledFeatures:
        """The items that a boolean mask ``[n]`` or their numbers choose, in this order."""
        states = None if self.states is None else self.states[chosen]
        sets = None if self.sets is None else self.sets[chosen]
        groups = [self.groups[number] for number in np.arange(len(self.groups))[chosen]]
        return LabelledFeatures(self.names, self.features[chosen], self.labels[chosen], groups, states, sets)

    @property
    def columns(self) -> Columns:
        """Each feature by its name, ``[n]``."""
        return dict(zip(self.names, self.features.T, strict=True))

    def with_probe(self, scores: Floats) -> LabelledFeatures:
        """The items with the scores of a probe, ``[n]``, as their last feature, and without their states."""
        features = np.column_stack([self.features, scores])
        return LabelledFeatures([*self.names, PROBE_FEATURE], features, self.labels, self.groups)

    def of(self, names: Sequence[str]) -> Floats:
        """The features of these names, ``[n, len(names)]``.

        Raises:
            CalibrationError: a feature was not measured.
        """
        if missing := [name for name in names if name not in self.names]:
            raise CalibrationError(f"not measured here, but needed: {', '.join(missing)}.")
        return self.features[:, [list(self.names).index(name) for name in names]]

    def times(self, repeats: int) -> LabelledFeatures:
        """The whole sequence of items, ``repeats`` times, without their states, which may be large."""
        features, labels = np.tile(self.features, (repeats, 1)), np.tile(self.labels, repeats)
        return LabelledFeatures(self.names, features, labels, self.groups * repeats)

    @staticmethod
    def pooled(sets: Sequence[LabelledFeatures]) -> LabelledFeatures:
        """The items of several data sets; prompts of different sets are different even if they have the same name."""
        states = [items.states for items in sets if items.states is not None]
        return LabelledFeatures(
            sets[0].names,
            np.concatenate([items.of(sets[0].names) for items in sets]),
            np.concatenate([items.labels for items in sets]),
            [f"{number}/{group}" for number, items in enumerate(sets) for group in items.groups],
            np.concatenate(states) if len(states) == len(sets) else None,
            np.repeat(np.arange(len(sets)), [len(items.labels) for items in sets]),
        )


@dataclass(frozen=True)
class _Fit:
    """A fitted model: scikit-learn's scaler and logistic regression, and what may come before and after them."""

    model: Any
    isotonic: Any = None
    direction: Direction | None = None

    def features(self, items: LabelledFeatures) -> Floats:
        """The features of items, the probe's score included."""
        if self.direction is None or items.states is None:
            return items.features
        return items.with_probe(scores_of(self.direction, items.states)).features

    def __call__(self, items: LabelledFeatures) -> Floats:
        """The risk of each item, ``[n]``."""
        risks: Floats = self.model.predict_proba(self.features(items))[:, 1]
        return risks if self.isotonic is None else self.isotonic.predict(risks)

    def risk(self, **others: Any) -> FittedRisk:
        """It as plain numbers."""
        scaler, model = self.model[0], self.model[-1]
        isotonic = None
        if self.isotonic is not None:
            x, first = np.unique(self.isotonic.X_thresholds_, return_index=True)
            y = np.maximum.accumulate(np.clip(self.isotonic.y_thresholds_[first], 0, 1))
            isotonic = Isotonic(x=x.tolist(), y=y.tolist())
        return FittedRisk(
            means=scaler.mean_.tolist(),
            scales=scaler.scale_.tolist(),
            weights=model.coef_[0].tolist(),
            intercept=float(model.intercept_[0]),
            isotonic=isotonic,
            **others,
        )


def fit(items: LabelledFeatures, data: str, settings: FitSettings = DEFAULTS) -> tuple[FittedRisk, Direction | None]:
    """Fit a risk on all items, and validate it by cross-validation on prompts that were left out.

    Items with hidden states also get a probe. Its score is their last feature: in the fit by a direction fitted on
    other prompts, in the validation by one fitted on the other folds.

    Args:
        items: the labelled items.
        data: a description of their data.
        settings: how it is fitted.

    Returns:
        The risk, and the direction of its probe; `None` for items without hidden states.

    Raises:
        CalibrationError: there are too few prompts, or a fold would have items of one class only.
        MissingExtraError: scikit-learn is not installed.
    """
    isotonic, folds, seed, threshold = settings.isotonic, settings.folds, settings.seed, settings.threshold
    need("sklearn.linear_model", extra="risk", what="fitting a calibrator")
    fitted_on, chosen_on = items, None
    if threshold and threshold[0] == "conformal":
        prompts = list(dict.fromkeys(items.groups))
        drawn = set(np.random.default_rng(seed).permutation(prompts)[: len(prompts) // 3].tolist())
        inside = np.array([group in drawn for group in items.groups])
        fitted_on, chosen_on = items.only(~inside), items.only(inside)
    _require(fitted_on, folds, isotonic=isotonic)
    repeats = max(1, min(MAX_REPEATS, ENOUGH_RISKS // len(fitted_on.labels)))
    divisions = [left_out(fitted_on, isotonic=isotonic, folds=folds, seed=number) for number in range(repeats)]
    risks = np.concatenate([of_items for of_items, _ in divisions])
    strata = np.concatenate([number * folds + of_items for number, (_, of_items) in enumerate(divisions)])
    if fitted_on.sets is not None:  # items of two sets are not compared: their shares of hallucinations would rank them
        strata = strata + folds * repeats * np.tile(fitted_on.sets, repeats)
    fitted = _fit(fitted_on, isotonic=isotonic)
    chosen = None
    if threshold:
        on = fitted_on.times(repeats) if chosen_on is None else chosen_on
        chosen = choose(*threshold, risks if chosen_on is None else fitted(on), on.labels, on.groups)
    risk = fitted.risk(
        data=data,
        features=[*items.names, *([] if fitted.direction is None else [PROBE_FEATURE])],
        domain=fit_domain(fitted.model[0].transform(fitted.features(fitted_on)), folds_of(fitted_on, folds)),
        validation=validate(
            fitted_on, risks, strata, repeats=repeats, draws=settings.draws, seed=seed, folds_each=folds
        ),
        threshold=chosen,
    )
    return risk, fitted.direction


def left_out(
    items: LabelledFeatures, *, isotonic: bool, folds: int = 5, seed: int = 0
) -> tuple[Floats, NDArray[np.intp]]:
    """Risks by cross-validation: each item's risk is from a fit on the prompts of the other folds.

    Args:
        items: the labelled items.
        isotonic, folds: as for :func:`fit`.
        seed: seed of the division into folds.

    Returns:
        The risk of each item, ``[n]``, and its fold, ``[n]``.
    """
    risks, of_item = np.empty(len(items.labels)), np.empty(len(items.labels), dtype=np.intp)
    for number, (rest, fold) in enumerate(folds_of(items, folds, seed)):
        risks[fold] = _fit(items.only(rest), isotonic=isotonic)(items.only(fold))
        of_item[fold] = number
    return risks, of_item


def fit_only(items: LabelledFeatures) -> Callable[[LabelledFeatures], Floats]:
    """The logistic model of some items, without a validation: it returns the risks of others, ``[n]``."""
    return _fit(items, isotonic=False)


def risks_of(fitted: FittedRisk, items: LabelledFeatures, probe: Direction | Probe | None = None) -> Floats:
    """The risk of each item by an existing fit, ``[n]``.

    Args:
        fitted: the fit.
        items: the items, with hidden states if the fit has a probe.
        probe: the fit's probe.

    Raises:
        CalibrationError: a feature of the fit was not measured.
    """
    if PROBE_FEATURE in fitted.features and probe is not None and items.states is not None:
        items = items.with_probe(scores_of(probe, items.states))
    return np.array([fitted(row) for row in items.of(fitted.features).tolist()])


def validate(
    items: LabelledFeatures,
    risks: Floats,
    folds: NDArray[np.intp] | None = None,
    *,
    repeats: int = 1,
    draws: int,
    seed: int,
    folds_each: int | None = None,
) -> Validation:
    """Evaluate risks of items that were not fitted on, and compare them with the baselines.

    Args:
        items: the labelled items.
        risks: their risks, ``[repeats * n]``.
        folds: the fold of each risk, ``[repeats * n]``, if the folds come from different fits. Risks and baselines are
            then ranked within each fold.
        repeats: how often the items were divided into folds.
        draws: draws of the bootstrap over prompts.
        seed: seed of the bootstrap.
        folds_each: the number of folds of each division, if ``folds`` also tells data sets apart.
    """
    items = items.times(repeats)
    bootstrap = Bootstrap(items.groups, draws, seed)
    labels = items.labels.astype(np.float64)
    strata = np.zeros(len(labels), dtype=np.intp) if folds is None else folds

    def ranked(values: Floats) -> Ranked:
        return Ranked(values, labels, 1 - labels, strata)

    fitted = ranked(risks)
    baselines = {}
    columns = items.columns
    for name, score in BASELINES.items():
        if name == "-source attention" and "source_attention" not in columns:
            continue
        baseline = ranked(score(columns))
        baselines[name] = Baseline(
            auroc=_estimate(bootstrap.interval(baseline, "auroc")),
            difference=_estimate(bootstrap.difference(fitted, baseline, "auroc")),
        )
    curve = reliability(risks, labels)
    return Validation(
        folds=folds_each or (0 if folds is None else len(set(folds.tolist())) // repeats),
        repeats=repeats,
        prompts=len(set(items.groups)),
        items=len(labels) // repeats,
        hallucinated=int(labels.sum()) // repeats,
        auroc=_estimate(bootstrap.interval(fitted, "auroc")),
        auprc=_estimate(bootstrap.interval(fitted, "auprc")),
        brier=brier(risks, labels),
        brier_of_base_rate=brier(np.full(len(labels), labels.mean()), labels),
        ece=expected_calibration_error(curve),
        reliability=[one.model_copy(update={"items": round(one.items / repeats)}) for one in curve],
        rivals=baselines,
    )


def _fit(items: LabelledFeatures, *, isotonic: bool) -> _Fit:
    from sklearn.isotonic import IsotonicRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import cross_val_predict
    from threadpoolctl import threadpool_limits

    direction = None
    if items.states is not None:
        direction, scores = fit_direction(items.states, items.labels, folds_of(items, FOLDS))
        items = items.with_probe(scores)
    folds = folds_of(items, 3)

    def loss(strength: float) -> float:
        """The log loss on left-out prompts."""
        data = (items.features, items.labels)
        risks: Any = cross_val_predict(_logistic(strength), *data, cv=folds, method="predict_proba")
        return float(log_loss(items.labels, risks))

    # The optimizer's steps are small: several threads wait for each other longer than they compute.
    with threadpool_limits(limits=1, user_api="blas"):
        model = _logistic(min(INVERSE_STRENGTHS, key=loss)).fit(items.features, items.labels)
    if not isotonic:
        return _Fit(model, direction=direction)
    unseen, _ = left_out(items, isotonic=False, folds=4)
    curve: Any = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(unseen, items.labels)
    return _Fit(model, curve, direction)


INVERSE_STRENGTHS = (0.03, 0.3, 3.0)
"""Inverse strengths of the logistic model's L2 penalty (scikit-learn's C). Every fit selects one of them."""


def _logistic(strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))


def folds_of(items: LabelledFeatures, folds: int, seed: int = 0) -> Folds:
    """Folds of the items. No prompt is in two of them."""
    from sklearn.model_selection import StratifiedGroupKFold

    # The prompts are shuffled here: scikit-learn before 1.8 no longer stratifies when it shuffles. The folds are those
    # of later versions.
    prompts, of_prompt = np.unique(items.groups, return_inverse=True)
    shuffled = np.argsort(np.random.RandomState(seed).permutation(len(prompts)))[of_prompt]
    splitter: Any = StratifiedGroupKFold(n_splits=folds)
    return list(splitter.split(items.features, items.labels, shuffled))


def _require(items: LabelledFeatures, folds: int, *, isotonic: bool) -> None:
    """Refuse items that cannot be fitted on."""
    if not np.isfinite(items.features).all():
        raise CalibrationError("a feature of an item is not finite; it cannot be fitted on.")
    within = 4 if isotonic else 3  # the rest of a fold is divided again, for the isotonic map or the strength
    least = max(2 * folds, math.ceil(within * folds / (folds - 1)))
    for what, chosen in (("hallucinated", items.labels), ("supported", ~items.labels)):
        prompts = len({group for group, is_one in zip(items.groups, chosen, strict=True) if is_one})
        if prompts < least:
            raise CalibrationError(
                f"{prompts} prompts have {what} items; {folds} folds of a cross-validation need at least {least}."
            )


def _estimate(interval: Interval) -> Estimate:
    if interval.low is None or interval.high is None:
        raise CalibrationError(
            "too few prompts for a bootstrap interval: every draw of prompts needs both classes. Give more prompts."
        )
    return Estimate(estimate=interval.estimate, low=interval.low, high=interval.high)
