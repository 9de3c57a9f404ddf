"""Thresholds of a risk, and measures of its calibration."""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cocoa_engine.errors import CalibrationError
from cocoa_engine.risk.fitted import ReliabilityBin, Rule, Threshold


def reached(risks: ArrayLike, labels: ArrayLike, threshold: float) -> tuple[float | None, float]:
    """Precision (`None` if nothing is flagged) and recall if every risk of at least the threshold is flagged."""
    flagged = np.asarray(risks, dtype=np.float64) >= threshold
    hallucinated = np.asarray(labels, dtype=bool)
    hits = int((flagged & hallucinated).sum())
    return hits / int(flagged.sum()) if flagged.any() else None, hits / max(1, int(hallucinated.sum()))


def for_precision(risks: ArrayLike, labels: ArrayLike, target: float) -> float:
    """The lowest threshold whose precision reaches the target on these spans, without a guarantee for other spans."""
    values, hallucinated = np.asarray(risks, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    _hallucinated(values, hallucinated)
    thresholds, of_span = np.unique(values, return_inverse=True)
    hits = np.bincount(of_span, hallucinated)[::-1].cumsum()[::-1]  # hallucinated spans flagged by each threshold
    precision = hits / np.bincount(of_span)[::-1].cumsum()[::-1]
    enough = np.flatnonzero(precision >= target)
    if not len(enough):
        raise CalibrationError(f"no threshold reaches a precision of {target:g}; the highest is {precision.max():.3f}.")
    return float(thresholds[enough[0]])


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


def ece_if_exact(risks: ArrayLike, *, draws: int = 1000, seed: int = 0) -> float:
    """The mean ECE that these risks would have if each were exactly the probability of a hallucination.

    It is above 0, because the share of a bin with few items is rarely its probability. An ECE near it does not show
    that the risks are wrong. The labels are drawn ``draws`` times.
    """
    values = np.asarray(risks, dtype=np.float64)
    drawn = np.random.default_rng(seed).random((draws, len(values))) < values
    return float(np.mean([expected_calibration_error(reliability(values, labels)) for labels in drawn]))
