"""Fits the direction of a probe: a ridge regression of the labels on the spans' hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocoa_engine.calibration.probe import Probe

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
    parts = folds(FOLDS)
    best: tuple[float, float, Floats] | None = None
    for strength in STRENGTHS:
        scores = np.empty(len(labels))
        for rest, fold in parts:
            scores[fold] = _ridge(states[rest], labels[rest], strength)(states[fold])
        error = float(np.mean((scores - labels) ** 2))
        if best is None or error < best[0]:
            best = error, strength, scores
    assert best is not None
    return _ridge(states, labels, best[1]), best[2]


def _ridge(states: Floats32, labels: NDArray[np.bool_], strength: float) -> Direction:
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    scaler: Any = StandardScaler().fit(states)
    model: Any = Ridge(alpha=strength * len(labels), solver="cholesky")
    model.fit(scaler.transform(states).astype(np.float32), labels.astype(np.float32))
    weights = np.asarray(model.coef_, dtype=np.float64) / scaler.scale_
    return Direction(weights, float(model.intercept_ - weights @ scaler.mean_))
