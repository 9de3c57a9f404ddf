"""Measures of calibration: Brier score, expected calibration error and reliability curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from cocoa_engine.risk.validation import ReliabilityBin


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
    total = sum(one.items for one in curve)
    return sum(one.items * abs(one.mean_risk - one.share_hallucinated) for one in curve) / total


def ece_if_exact(risks: ArrayLike, *, draws: int = 1000, seed: int = 0) -> float:
    """The mean ECE that these risks would have if each were exactly the probability of a hallucination.

    It is above 0, because the share of a bin with few items is rarely its probability. An ECE near it does not show
    that the risks are wrong.

    Args:
        risks: the risks, ``[n]``.
        draws: how often the labels are drawn.
        seed: seed of the draws.
    """
    values = np.asarray(risks, dtype=np.float64)
    drawn = np.random.default_rng(seed).random((draws, len(values))) < values
    return float(np.mean([expected_calibration_error(reliability(values, labels)) for labels in drawn]))
