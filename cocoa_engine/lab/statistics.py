"""Statistics of risks: AUROC and AUPRC with bootstrap intervals, thresholds and calibration."""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cocoa_engine.errors import CalibrationError, DataError
from cocoa_engine.risk.fitted import ReliabilityBin, Rule, Threshold


def reached(risks: ArrayLike, labels: ArrayLike, threshold: float) -> tuple[float | None, float]:
    """Precision (`None` if nothing is flagged) and recall if every risk of at least the threshold is flagged."""
    flagged = np.asarray(risks, dtype=np.float64) >= threshold
    hallucinated = np.asarray(labels, dtype=bool)
    hits = int((flagged & hallucinated).sum())
    return hits / int(flagged.sum()) if flagged.any() else None, hits / max(1, int(hallucinated.sum()))


def for_precision(risks: ArrayLike, labels: ArrayLike, target: float) -> float:
    """The lowest threshold whose precision reaches the target on these spans, without a guarantee for other spans."""
    from sklearn.metrics import precision_recall_curve

    _hallucinated(risks, labels)
    precision, _, thresholds = precision_recall_curve(labels, risks)
    precision = precision[:-1]  # the last one has no threshold
    if precision.max() < target:
        raise CalibrationError(f"no threshold reaches a precision of {target:g}; the highest is {precision.max():.3f}.")
    return float(thresholds[precision >= target][0])


def for_recall(risks: ArrayLike, labels: ArrayLike, target: float) -> float:
    """The highest threshold whose recall reaches the target on these spans, without a guarantee for other spans."""
    values = np.sort(_hallucinated(risks, labels))[::-1]
    needed = int(np.ceil(target * len(values) - 1e-9))
    return float(values[max(needed, 1) - 1])


def for_specificity(risks: ArrayLike, labels: ArrayLike, target: float) -> float:
    """The lowest threshold that leaves at least the target share of these supported spans unflagged.

    There is no guarantee for other spans. The threshold is halfway between two risks, or above the highest.
    """
    values = np.asarray(risks, dtype=np.float64)
    supported = np.sort(values[~np.asarray(labels, dtype=bool)])
    if not len(supported):
        raise CalibrationError("choosing a threshold by specificity needs supported spans.")
    passed = max(int(np.ceil(target * len(supported) - 1e-9)), 1)
    last = supported[passed - 1]  # it must pass, and so do all that are equal
    above = values[values > last]
    return float((last + above.min()) / 2) if len(above) else float(np.nextafter(last, np.inf))


def conformal(risks: ArrayLike, labels: ArrayLike, groups: Sequence[Hashable], target: float) -> float:
    """A threshold for which the expected share of missed hallucinated spans is at most the target.

    Conformal risk control (Angelopoulos et al., 2022). The loss of a prompt is the share of its hallucinated spans
    whose risk is below the threshold, or 0 if it has none. The loss is at most 1 and does not decrease as the threshold
    rises. With the mean loss R(t) over n prompts, the threshold is the highest t with (n R(t) + 1) / (n + 1) <= target.

    Guarantee: E[loss of a new prompt] <= target, for any quality of the risks, over the draw of the n prompts and the
    new one, if (1) all n + 1 prompts are exchangeable, and (2) the calibrator was fitted on none of them. The guarantee
    holds on average over prompts, not for each prompt or kind of prompt, and does not limit false alarms. With a target
    below 1 / (n + 1), only the threshold 0 is safe, which flags every span.
    """
    values, hallucinated = np.asarray(risks, dtype=np.float64), np.asarray(labels, dtype=bool)
    if not len(values):
        raise CalibrationError("choosing a threshold needs spans.")
    names = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    of_span = np.array([names[group] for group in groups])
    in_prompt = np.bincount(of_span[hallucinated], minlength=len(names))
    weights = 1 / np.maximum(in_prompt[of_span[hallucinated]], 1)  # of each hallucinated span in its prompt's loss
    order = np.argsort(values[hallucinated])
    candidates, weights = values[hallucinated][order], weights[order]
    n = len(names)
    # a threshold equal to a span's risk misses all hallucinated spans strictly below it
    below = np.searchsorted(candidates, candidates, side="left")
    missed = np.concatenate([[0.0], np.cumsum(weights)])[below]  # n R(t)
    safe = candidates[(missed + 1) / (n + 1) <= target]
    return float(safe[-1]) if len(safe) else 0.0


def choose(rule: Rule, target: float, risks: ArrayLike, labels: ArrayLike, groups: Sequence[Hashable]) -> Threshold:
    """Choose a threshold by one of the rules, with its precision and recall on the spans it was chosen on.

    Raises:
        CalibrationError: the target cannot be reached.
    """
    if rule == "conformal":
        value = conformal(risks, labels, groups, target)
    else:
        choice = {"precision": for_precision, "recall": for_recall, "specificity": for_specificity}[rule]
        value = choice(risks, labels, target)
    precision, recall = reached(risks, labels, value)
    prompts = len(set(groups))
    return Threshold(value=value, rule=rule, target=target, precision=precision, recall=recall, prompts=prompts)


def _hallucinated(risks: ArrayLike, labels: ArrayLike) -> NDArray[np.float64]:
    values: NDArray[np.float64] = np.asarray(risks, dtype=np.float64)[np.asarray(labels, dtype=bool)]
    if not len(values):
        raise CalibrationError("choosing a threshold needs hallucinated spans.")
    return values


def brier(risks: ArrayLike, labels: ArrayLike) -> float:
    """Mean of (risk - label)^2."""
    return float(np.mean((np.asarray(risks, dtype=np.float64) - np.asarray(labels, dtype=np.float64)) ** 2))


def reliability(risks: ArrayLike, labels: ArrayLike, bins: int = 10) -> list[ReliabilityBin]:
    """Divide items by their risk into bins of equal size, lowest first. Items of equal risk stay in one bin."""
    values, truth = np.asarray(risks, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1]))
    bin_of_item = np.searchsorted(edges, values, side="left")
    return [
        ReliabilityBin(
            items=int(inside.sum()),
            mean_risk=float(values[inside].mean()),
            share_hallucinated=float(truth[inside].mean()),
        )
        for inside in (bin_of_item == number for number in range(len(edges) + 1))
        if inside.any()
    ]


def expected_calibration_error(curve: list[ReliabilityBin]) -> float:
    """ECE: the sum over bins of (items of the bin / all items) * abs(mean risk - share hallucinated)."""
    total = sum(part.items for part in curve)
    return sum(part.items * abs(part.mean_risk - part.share_hallucinated) for part in curve) / total


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
