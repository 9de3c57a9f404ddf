"""Fits the direction of a probe: a ridge regression of the labels on the spans' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocoa_engine.risk.probe import Probe

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]

STRENGTHS = (0.1, 1.0, 10.0)
"""Strengths of the ridge penalty on standardised states, for each span. Every fit selects one of them."""

FOLDS = 5
"""Folds of the cross-fit. With fewer prompts of a class, there are as many folds as such prompts, and at least 2."""


@dataclass(frozen=True)
class Direction:
    """A direction of hidden states: the score of a span is w . h + b, with its mean state h.

    Attributes:
        weights: w, ``[d]``.
        intercept: b.
    """

    weights: Floats
    intercept: float

    def __call__(self, states: Floats32) -> Floats:
        """The score of each span, ``[n]``, from ``[n, d]``."""
        scores: Floats = states.astype(np.float64) @ self.weights + self.intercept
        return scores


def direction_of(probe: Probe) -> Direction:
    """The direction of a calibrator's probe."""
    return Direction(np.array(probe.weights), probe.intercept)


def fit_direction(
    states: Floats32,
    labels: NDArray[np.bool_],
    folds: Callable[[int], Sequence[tuple[NDArray[np.bool_], NDArray[np.bool_]]]],
) -> tuple[Direction, Floats]:
    """Fit a direction on all spans, and score each span by a direction that was fitted without its prompt.

    What is fitted on top of the scores must use the cross-fitted ones: a direction of hundreds of numbers separates the
    spans that it was fitted on too well.

    Args:
        states: the mean hidden states, ``[n, d]``.
        labels: whether each span is hallucinated, ``[n]``.
        folds: divides the spans into a number of folds by prompt: for each, the masks of the others and of its own.

    Returns:
        The direction, and the cross-fitted scores, ``[n]``.
    """
    mean, scale = states.mean(axis=0), states.std(axis=0)
    scale[scale == 0] = 1
    scaled, y = (states - mean) / scale, labels.astype(np.float64)
    parts = folds(FOLDS)
    sums = [_Sums.of(scaled[fold], y[fold]) for _, fold in parts]
    total = _Sums(*(np.sum([getattr(one, name) for one in sums], axis=0) for name in _Sums._fields))
    best: tuple[float, float, Floats] | None = None
    for strength in STRENGTHS:
        scores = np.empty(len(labels))
        for (_, fold), own in zip(parts, sums, strict=True):
            scores[fold] = total.without(own).ridge(strength)(scaled[fold])
        error = float(np.mean((scores - labels) ** 2))
        if best is None or error < best[0]:
            best = error, strength, scores
    assert best is not None
    found = total.ridge(best[1])
    weights = found.weights / scale
    return Direction(weights, found.intercept - float(weights @ mean)), best[2]


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

    def without(self, fold: _Sums) -> _Sums:
        return _Sums(*(all_rows - own for all_rows, own in zip(self, fold, strict=True)))

    def ridge(self, strength: float) -> Direction:
        """argmin_w,b |Xw + b - y|^2 + strength * n * |w|^2."""
        covariance = self.squares - np.outer(self.states, self.states) / self.count
        penalty = strength * self.count * np.eye(len(self.states))
        weights = np.linalg.solve(covariance + penalty, self.products - self.states * (self.labels / self.count))
        return Direction(weights, float((self.labels - weights @ self.states) / self.count))
