"""Fitting a risk on labelled spans or answers, and validating it on unseen prompts. Needs scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from cocoa_engine.arguments import SettingsModel
from cocoa_engine.errors import CalibrationError, CocoaError, need
from cocoa_engine.lab.statistics import (
    Bootstrap,
    Interval,
    Ranked,
    brier,
    choose,
    expected_calibration_error,
    reliability,
)
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


class FitSettings(SettingsModel, frozen=True):
    """How a calibrator is fitted and validated.

    Attributes:
        probe: also fit a probe of each level, a direction of the model's hidden states. It improves the risk of answers
            like these, and makes it worse on others.
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
        rule, target = threshold or ("precision", 1.0)
        if not 0 < target <= 1 or (rule == "conformal" and target == 1):
            ends = "the share that may be missed must be above 0 and below 1"
            raise CalibrationError(
                f"{ends if rule == 'conformal' else f'a {rule} is above 0 and at most 1'}: {target:g}."
            )
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
        states: the mean hidden states of each item after one or more layers, ``[n, k, d]``, for a probe; `None` for a
            fit without a probe.
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
        return replace(
            self,
            features=self.features[chosen],
            labels=self.labels[chosen],
            groups=[self.groups[number] for number in np.arange(len(self.groups))[chosen]],
            states=None if self.states is None else self.states[chosen],
            sets=None if self.sets is None else self.sets[chosen],
        )

    @property
    def columns(self) -> Mapping[str, Floats]:
        """Each feature by its name, ``[n]``."""
        return dict(zip(self.names, self.features.T, strict=True))

    @property
    def fewest_prompts(self) -> int:
        """The number of prompts with items of the class that has fewer."""
        return min(len(set(self.only(chosen).groups)) for chosen in (self.labels, ~self.labels))

    def with_probe(self, scores: Floats) -> LabelledFeatures:
        """The items with the scores of a probe, ``[n]``, as their last feature, and without their states."""
        features = np.column_stack([self.features, scores])
        return replace(self, names=[*self.names, PROBE_FEATURE], features=features, states=None)

    def of(self, names: Sequence[str]) -> Floats:
        """The features of these names, ``[n, len(names)]``; a CalibrationError if one was not measured."""
        if missing := [name for name in names if name not in self.names]:
            raise CalibrationError(f"not measured here, but needed: {', '.join(missing)}.")
        return self.features[:, [list(self.names).index(name) for name in names]]

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


def folds_of(items: LabelledFeatures, folds: int, seed: int = 0) -> Folds:
    """Folds of the items. No prompt is in two of them."""
    from sklearn.model_selection import StratifiedGroupKFold

    # The prompts are shuffled here: scikit-learn before 1.8 no longer stratifies when it shuffles. The folds are those
    # of later versions.
    prompts, of_prompt = np.unique(items.groups, return_inverse=True)
    shuffled = np.argsort(np.random.RandomState(seed).permutation(len(prompts)))[of_prompt]
    splitter: Any = StratifiedGroupKFold(n_splits=folds)
    return list(splitter.split(items.features, items.labels, shuffled))


STRENGTHS, FOLDS = (0.1, 1.0, 10.0), 5
"""Strengths of the ridge penalty on standardised states, for each item, of which every fit selects one; and the folds
of the cross-fit. With fewer prompts of a class, there are as many folds as such prompts, and at least 2."""


class Direction(NamedTuple):
    """A direction of hidden states: the score of an item is w . h + b, with its mean state h and weights w, ``[d]``.

    ``at`` is the place of the layer among those that the states are of.
    """

    weights: Floats
    intercept: float
    at: int = -1


def scores_of(direction: Direction, states: Floats32) -> Floats:
    """The score of each item, ``[n]``, from ``[n, k, d]``."""
    scores: Floats = states[:, direction.at].astype(np.float64) @ direction.weights + direction.intercept
    return scores


def fit_direction(states: Floats32, labels: NDArray[np.bool_], folds: Folds) -> tuple[Direction, Floats]:
    """Fit a direction on all items, and score each item by a direction that was fitted without its prompt.

    What is fitted on top of the scores must use these cross-fitted ones, ``[n]``: a direction of hundreds of numbers
    separates the items that it was fitted on too well. The layer is that whose scores have the least squared error.
    """
    fits = [_ridge_direction(states[:, at], labels, folds) for at in range(states.shape[1])]
    at = int(np.argmin([((scores - labels) ** 2).mean() for _, scores in fits]))
    direction, scores = fits[at]
    return direction._replace(at=at), scores


def _ridge_direction(states: Floats32, labels: NDArray[np.bool_], folds: Folds) -> tuple[Direction, Floats]:
    """:func:`fit_direction` for the states after one layer, ``[n, d]``."""
    mean, scale = states.mean(axis=0), states.std(axis=0)
    scale[scale == 0] = 1
    scaled, y, size = (states - mean) / scale, labels.astype(np.float64), len(mean)

    def products(fold: NDArray[np.intp]) -> Floats:
        """The products of the columns of X, 1 and y, ``[d + 2, d + 2]``. Those of folds add up."""
        x, beside = scaled[fold], np.column_stack([np.ones(len(fold)), y[fold]])
        across = x.astype(np.float64).T @ beside
        return np.block([[(x.T @ x).astype(np.float64), across], [across.T, beside.T @ beside]])

    def ridge(sums: Floats, strength: float) -> Direction:
        """argmin_w,b |Xw + b - y|^2 + strength * n * |w|^2."""
        of_x, count, of_y = sums[:size, size], sums[size, size], sums[size, -1]
        covariance = sums[:size, :size] - np.outer(of_x, of_x) / count
        penalty = strength * count * np.eye(size)
        weights = np.linalg.solve(covariance + penalty, sums[:size, -1] - of_x * (of_y / count))
        return Direction(weights, float((of_y - weights @ of_x) / count))

    of_folds = [products(fold) for _, fold in folds]
    total = np.sum(of_folds, axis=0)
    scores = np.empty((len(STRENGTHS), len(labels)))
    for row, strength in zip(scores, STRENGTHS, strict=True):
        for (_, fold), own in zip(folds, of_folds, strict=True):
            row[fold] = scores_of(ridge(total - own, strength), scaled[fold, None])
    best = int(np.argmin(((scores - y) ** 2).mean(axis=1)))
    direction = ridge(total, STRENGTHS[best])
    weights = direction.weights / scale
    return Direction(weights, direction.intercept - float(weights @ mean)), scores[best]


CUT, JITTER = 0.005, 0.01
"""Before centre and covariance are estimated, each feature is cut at this quantile on either side. JITTER is added to
the variance of each scaled feature, so that features which determine one another can be inverted."""


def fit_domain(scaled: Floats, folds: Folds) -> Domain:
    """Fit the ellipsoid on the scaled features of all items, ``[n, k]``. Its cut-off is of items left out of a fit."""

    def ellipsoid(inside: Floats) -> tuple[Floats, Floats]:
        """The centre, ``[k]``, and the precision, ``[k, k]``."""
        cut = np.clip(inside, *np.quantile(inside, [CUT, 1 - CUT], axis=0))
        covariance = np.atleast_2d(np.cov(cut, rowvar=False)) + JITTER * np.eye(scaled.shape[1])
        return cut.mean(axis=0), np.linalg.inv(covariance).astype(np.float64)

    distances = []  # squared, as in Domain.is_outside
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


INVERSE_STRENGTHS = (0.03, 0.3, 3.0)
"""Inverse strengths of the logistic model's L2 penalty (scikit-learn's C). Every fit selects one of them."""


@dataclass(frozen=True)
class Fit:
    """scikit-learn's scaler and logistic regression, and what may come before and after them."""

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


@cache
def _thread_pools() -> Any:
    """Those of the libraries of this process, which are looked for once."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def fit_only(items: LabelledFeatures, *, isotonic: bool = False) -> Fit:
    """Fit some items, without a validation."""
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    direction = None
    if items.states is not None:
        folds = folds_of(items, max(2, min(FOLDS, items.fewest_prompts)))
        direction, scores = fit_direction(items.states, items.labels, folds)
        items = items.with_probe(scores)
    folds, data = folds_of(items, 3), (items.features, items.labels)

    def loss(model: Any) -> float:
        """The log loss on left-out prompts."""
        risks: Any = cross_val_predict(model, *data, cv=folds, method="predict_proba")
        return float(log_loss(items.labels, risks))

    # The optimizer's steps are small: several threads wait for each other longer than they compute.
    with _thread_pools().limit(limits=1, user_api="blas"):
        models = [
            make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
            for strength in INVERSE_STRENGTHS
        ]
        model = min(models, key=loss).fit(*data)
    if not isotonic:
        return Fit(model, direction=direction)
    unseen, _ = left_out(items, isotonic=False, folds=4)
    return Fit(model, IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(unseen, items.labels), direction)


def left_out(
    items: LabelledFeatures, *, isotonic: bool, folds: int = 5, seed: int = 0
) -> tuple[Floats, NDArray[np.intp]]:
    """Risks by cross-validation: the risk of each item, ``[n]``, by a fit on the prompts of the other folds; and its
    fold, ``[n]``."""
    risks, of_item = np.empty(len(items.labels)), np.empty(len(items.labels), dtype=np.intp)
    for number, (rest, fold) in enumerate(folds_of(items, folds, seed)):
        risks[fold] = fit_only(items.only(rest), isotonic=isotonic)(items.only(fold))
        of_item[fold] = number
    return risks, of_item


def auroc_left_out(items: LabelledFeatures, folds: int = 5) -> float:
    """The AUROC of risks by cross-validation; NaN if a class has too few prompts for it."""
    if items.fewest_prompts < 2 * folds:
        return math.nan
    risks, of_item = left_out(items, isotonic=False, folds=folds)
    labels = items.labels.astype(np.float64)
    return float(Ranked(risks, labels, 1 - labels, of_item).auroc()[0])


MAX_REPEATS, ENOUGH_RISKS = 5, 20_000
"""With few items, the validation depends on how they are divided into folds. The division is therefore repeated until
there are ENOUGH_RISKS out-of-fold risks, at most MAX_REPEATS times."""


def fit(items: LabelledFeatures, data: str, settings: FitSettings = DEFAULTS) -> tuple[FittedRisk, Direction | None]:
    """Fit a risk on all items, described as ``data``, and validate it on prompts that were left out.

    Items with hidden states also get a probe. Its score is their last feature: in the fit by a direction fitted on
    other prompts, in the validation by one fitted on the other folds.

    Returns:
        The risk, and the direction of its probe; `None` for items without hidden states.

    Raises:
        CalibrationError: there are too few prompts, or a fold would have items of one class only.
    """
    isotonic, folds, threshold = settings.isotonic, settings.folds, settings.threshold
    need("sklearn.linear_model", extra="risk", what="fitting a calibrator")
    chosen_on = None
    if threshold and threshold[0] == "conformal":
        prompts = list(dict.fromkeys(items.groups))
        drawn = set(np.random.default_rng(settings.seed).permutation(prompts)[: len(prompts) // 3].tolist())
        inside = np.array([group in drawn for group in items.groups])
        items, chosen_on = items.only(~inside), items.only(inside)
    _require(items, folds, isotonic=isotonic)
    repeats = max(1, min(MAX_REPEATS, ENOUGH_RISKS // len(items.labels)))
    divisions = [left_out(items, isotonic=isotonic, folds=folds, seed=number) for number in range(repeats)]
    risks = np.concatenate([of_items for of_items, _ in divisions])
    strata = np.concatenate([number * folds + of_items for number, (_, of_items) in enumerate(divisions)])
    if items.sets is not None:  # items of two sets are not compared: their shares of hallucinations would rank them
        strata = strata + folds * repeats * np.tile(items.sets, repeats)
    fitted = fit_only(items, isotonic=isotonic)
    chosen = None
    if threshold and chosen_on is not None:
        chosen = choose(*threshold, fitted(chosen_on), chosen_on.labels, chosen_on.groups)
    elif threshold:
        chosen = choose(*threshold, risks, np.tile(items.labels, repeats), items.groups * repeats)
    scaler, logistic = fitted.model
    curve = None
    if fitted.isotonic is not None:
        x, first = np.unique(fitted.isotonic.X_thresholds_, return_index=True)
        y = np.maximum.accumulate(np.clip(fitted.isotonic.y_thresholds_[first], 0, 1))
        curve = Isotonic(x=x.tolist(), y=y.tolist())
    validation = validate(
        items, risks, strata, repeats=repeats, draws=settings.draws, seed=settings.seed, folds_each=folds
    )
    risk = FittedRisk(
        data=data,
        features=[*items.names, *([] if fitted.direction is None else [PROBE_FEATURE])],
        means=scaler.mean_.tolist(),
        scales=scaler.scale_.tolist(),
        weights=logistic.coef_[0].tolist(),
        intercept=float(logistic.intercept_[0]),
        isotonic=curve,
        domain=fit_domain(scaler.transform(fitted.features(items)), folds_of(items, folds)),
        validation=validation,
        threshold=chosen,
    )
    return risk, fitted.direction


def _require(items: LabelledFeatures, folds: int, *, isotonic: bool) -> None:
    """Refuse items that cannot be fitted on."""
    if not np.isfinite(items.features).all():
        raise CalibrationError("a feature of an item is not finite; it cannot be fitted on.")
    within = 4 if isotonic else 3  # the rest of a fold is divided again, for the isotonic map or the strength
    least = max(2 * folds, math.ceil(within * folds / (folds - 1)))
    for what, chosen in (("hallucinated", items.labels), ("supported", ~items.labels)):
        prompts = len(set(items.only(chosen).groups))
        if prompts < least:
            raise CalibrationError(
                f"{prompts} prompts have {what} items; {folds} folds of a cross-validation need at least {least}."
            )


def risks_of(fitted: FittedRisk, items: LabelledFeatures, probe: Probe | None = None) -> Floats:
    """The risk of each item by an existing fit and its probe, ``[n]``; a CalibrationError without its features.

    The last layer of the items' states is that of the probe.
    """
    if PROBE_FEATURE in fitted.features and probe is not None and items.states is not None:
        items = items.with_probe(scores_of(Direction(np.array(probe.weights), probe.intercept), items.states))
    return np.array([fitted(row) for row in items.of(fitted.features).tolist()])


BASELINES: dict[str, Callable[[Mapping[str, Floats]], Floats]] = {
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
    """Evaluate the risks of items that were not fitted on, ``[repeats * n]``, and compare them with the baselines.

    If ``folds``, ``[repeats * n]``, gives each risk the number of the fit that it comes from, risks and baselines are
    ranked within each. If that also tells data sets apart, ``folds_each`` is the number of folds of a division.
    """
    bootstrap = Bootstrap(items.groups * repeats, draws, seed)
    labels = np.tile(items.labels, repeats).astype(np.float64)

    def ranked(values: Floats) -> Ranked:
        return Ranked(values, labels, 1 - labels, np.zeros(len(labels)) if folds is None else folds)

    def estimate(interval: Interval) -> Estimate:
        if interval.low is None or interval.high is None:
            raise CalibrationError(
                "too few prompts for a bootstrap interval: every draw of prompts needs both classes. Give more prompts."
            )
        return Estimate(**interval._asdict())

    fitted, columns = ranked(risks), items.columns
    baselines = {}
    for name, score in BASELINES.items():
        if name != "-source attention" or "source_attention" in columns:
            baseline = ranked(np.tile(score(columns), repeats))
            baselines[name] = Baseline(
                auroc=estimate(bootstrap.interval(baseline, "auroc")),
                difference=estimate(bootstrap.difference(fitted, baseline, "auroc")),
            )
    curve = reliability(risks, labels)
    return Validation(
        folds=folds_each or (0 if folds is None else len(set(folds.tolist())) // repeats),
        repeats=repeats,
        prompts=len(set(items.groups)),
        items=len(items.labels),
        hallucinated=int(items.labels.sum()),
        auroc=estimate(bootstrap.interval(fitted, "auroc")),
        auprc=estimate(bootstrap.interval(fitted, "auprc")),
        brier=brier(risks, labels),
        brier_of_base_rate=brier(np.full(len(labels), labels.mean()), labels),
        ece=expected_calibration_error(curve),
        reliability=[part.model_copy(update={"items": round(part.items / repeats)}) for part in curve],
        rivals=baselines,
    )
