"""Statistics of rankings: AUROC and AUPRC with bootstrap intervals, and the paper's paired test."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cocoa_engine.errors import DataError, need

Floats = NDArray[np.float64]
Measure = Literal["auroc", "auprc"]


class Interval(NamedTuple):
    """An estimate with its 95 % percentile bootstrap interval, widened if necessary to include the estimate; `None` if
    all items are of one group, or no draw had both classes."""

    estimate: float
    low: float | None
    high: float | None

    def shown(self, form: str = ".3f") -> str:
        """The estimate as text, followed by the interval in parentheses if there is one."""
        if self.low is None or self.high is None:
            return f"{self.estimate:{form}}"
        return f"{self.estimate:{form}} ({self.low:{form}} – {self.high:{form}})"


FEW_GROUPS = 10
"""Intervals over fewer groups are too narrow."""


def caution(groups: int) -> str | None:
    """A warning if this number of prompts is too small for intervals, otherwise `None`."""
    if groups < 2:
        return "No intervals: they are drawn over prompts, and there is only one."
    if groups < FEW_GROUPS:
        return f"Intervals over only {groups} prompts are too narrow."
    return None


class Ranked:
    """Sorted scores of n items, for computing AUROC and AUPRC under many weightings.

    Items are compared only with items of their own stratum, if there are several. This is for risks of a
    cross-validation, where each fold's risks come from a different fit. If a fold has more hallucinated items, its
    model was fitted on fewer, so the AUROC over all folds together is too low (Airola et al., 2011, "An experimental
    comparison of cross-validation techniques for estimating the area under the ROC curve").

    Scores are higher for what is riskier, and ties count half. ``positive`` and ``negative`` are the weights of each
    item in either class. Strata that lack a class are ignored.

    Raises:
        DataError: a score is NaN, or no stratum has both classes.
    """

    def __init__(
        self, scores: ArrayLike, positive: ArrayLike, negative: ArrayLike, strata: ArrayLike | None = None
    ) -> None:
        values, self._positive, self._negative = (
            np.asarray(column, dtype=np.float64) for column in (scores, positive, negative)
        )
        if np.isnan(values).any():
            raise DataError("a score is NaN: it cannot be ranked.")
        stratum_of_item = np.zeros(len(values)) if strata is None else np.asarray(strata)
        self._within = strata is not None
        self._parts: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        for stratum in np.unique(stratum_of_item):
            members = np.flatnonzero(stratum_of_item == stratum)
            if self._positive[members].any() and self._negative[members].any():
                ordered = members[np.argsort(-values[members], kind="stable")]
                ranked = values[ordered]  # and where each distinct score begins
                self._parts.append((ordered, np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])))
        if not self._parts:
            raise DataError("both hallucinated and supported items are needed to rank them.")

    def auroc(self, weights: Floats | None = None) -> Floats:
        """P(a hallucinated item scores higher than a supported one) + P(equal) / 2, the mean over such pairs.

        ``weights``, ``[B, n]``, is how often each item was drawn in each of B samples; `None` counts each item once.
        Returns ``[B]``, NaN for samples that lack a class.
        """

        def of_part(positive: Floats, negative: Floats) -> tuple[Floats, Floats]:
            above = np.cumsum(positive, axis=1) - positive / 2  # hallucinated weight at or above a score, ties half
            return (above * negative).sum(axis=1), positive.sum(axis=1) * negative.sum(axis=1)

        return self._mean(weights, of_part)

    def auprc(self, weights: Floats | None = None) -> Floats:
        """Average precision: the mean, over hallucinated items, of the precision at their score; see :meth:`auroc`."""

        def of_part(positive: Floats, negative: Floats) -> tuple[Floats, Floats]:
            reached, all_at_least = np.cumsum(positive, axis=1), np.cumsum(positive + negative, axis=1)
            precision = np.divide(reached, all_at_least, out=np.zeros_like(reached), where=all_at_least > 0)
            both = negative.sum(axis=1) > 0 if self._within else 1.0
            return (precision * positive).sum(axis=1) * both, positive.sum(axis=1) * both

        return self._mean(weights, of_part)

    def _mean(self, weights: Floats | None, of_part: Callable[[Floats, Floats], tuple[Floats, Floats]]) -> Floats:
        """The sum over strata of what ``of_part`` counts, of the weight of either class at each distinct score from the
        highest, ``[B, scores]``, divided by how many it counts."""
        drawn = np.ones((1, len(self._positive))) if weights is None else weights
        value = total = np.zeros(len(drawn))
        for ordered, starts in self._parts:
            of_scores = (
                np.add.reduceat(drawn[:, ordered] * weight[ordered], starts, axis=1)
                for weight in (self._positive, self._negative)
            )
            of_stratum, count = of_part(*of_scores)
            value, total = value + of_stratum, total + count
        with np.errstate(invalid="ignore"):
            return np.asarray(value / total)


class Bootstrap:
    """Draws of whole groups with replacement. Every score uses the same draws, so that scores can be compared."""

    _ROWS = 50  # bootstrap samples in memory at once, since n may be large

    def __init__(self, groups: Sequence[Hashable], draws: int = 1000, seed: int = 0) -> None:
        names = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        self._group_of_item = np.array([names[group] for group in groups])
        random = np.random.default_rng(seed)
        self._counts = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)

    def samples(self, ranked: Ranked, measure: Measure) -> Floats:
        """``"auroc"`` or ``"auprc"`` of each draw, ``[draws]``; NaN if it lacks a class or there is one group only."""
        if self._counts.shape[1] < 2:
            return np.full(len(self._counts), np.nan)
        parts = [self._counts[start : start + self._ROWS] for start in range(0, len(self._counts), self._ROWS)]
        weights = (part[:, self._group_of_item].astype(np.float64) for part in parts)
        return np.concatenate([getattr(ranked, measure)(of_part) for of_part in weights])

    def interval(self, ranked: Ranked, measure: Measure) -> Interval:
        """``"auroc"`` or ``"auprc"`` with its interval."""
        return interval(float(getattr(ranked, measure)()[0]), self.samples(ranked, measure))

    def difference(self, a: Ranked, b: Ranked, measure: Measure) -> Interval:
        """How much better ``a`` ranks than ``b``, with the interval over draws."""
        estimate = float(getattr(a, measure)()[0] - getattr(b, measure)()[0])
        return interval(estimate, self.samples(a, measure) - self.samples(b, measure))


def interval(estimate: float, samples: Floats) -> Interval:
    """The 2.5 % and 97.5 % quantiles of bootstrap samples, without samples that lack a class."""
    finite = samples[np.isfinite(samples)]
    if not len(finite):
        return Interval(estimate, None, None)
    low, high = np.quantile(finite, [0.025, 0.975])
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate))


class PairedTest(NamedTuple):
    """Wilcoxon's signed-rank test on N pairs, with the direction of the difference.

    ``z`` is the statistic of the normal approximation, positive if the supported answers score higher; the effect size
    is r = abs(Z) / sqrt(N). The paper reports the two-sided p value, which does not show the direction; ``p_right``
    does. ``right`` is the share of pairs whose supported answer scores higher; ties count half.
    """

    pairs: int
    z: float
    effect_size: float
    p_two_sided: float
    p_right: float
    right: float


def paired_test(supported: Sequence[float], hallucinated: Sequence[float]) -> PairedTest:
    """Whether supported answers score higher than hallucinated ones to the same prompts (higher is better).

    Raises:
        DataError: there are no pairs, or no pair's scores differ.
        MissingExtraError: scipy is not installed.
    """
    stats = need("scipy.stats", extra="risk", what="the signed-rank test")
    difference = np.asarray(supported, dtype=np.float64) - np.asarray(hallucinated, dtype=np.float64)
    if not difference.any():
        raise DataError("a paired test needs pairs of a supported and a hallucinated answer that differ.")
    right = stats.wilcoxon(difference, method="approx", alternative="greater")
    both = stats.wilcoxon(difference, method="approx")
    z = float(right.zstatistic)
    return PairedTest(
        pairs=len(difference),
        z=z,
        effect_size=abs(z) / math.sqrt(len(difference)),
        p_two_sided=float(both.pvalue),
        p_right=float(right.pvalue),
        right=float(np.mean(difference > 0) + np.mean(difference == 0) / 2),
    )
