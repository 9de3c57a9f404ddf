"""The mean of a metric with its standard error, and its paired difference to the first method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np

from cocoa_engine.lab.ranking import FEW_GROUPS, Interval, interval

DRAWS = 2000
_AT_ONCE = 100  # draws in memory at once


class Difference(TypedDict):
    """A mean paired difference with its 95 % bootstrap interval over samples, which is ``None`` for a single sample."""

    estimate: float
    low: float | None
    high: float | None
    samples: int


def statistics(values: Mapping[str, float], first: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The statistics of one metric of one method.

    Args:
        values: the metric of each sample, by the id of the sample.
        first: the same of the first method. ``None`` for that method itself.

    Returns:
        ``mean``, ``standard_error`` (``None`` for a single sample) and, with ``first``, the ``difference`` over the
        samples that both methods have.
    """
    everything = np.array(list(values.values()), dtype=np.float64)
    found: dict[str, Any] = {
        "mean": math.fsum(values.values()) / len(values),
        "standard_error": float(everything.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None,
    }
    if first is not None and (common := [key for key in values if key in first]):
        found["difference"] = _difference(np.array([values[key] - first[key] for key in common]))
    return found


def _difference(differences: np.ndarray[Any, np.dtype[np.float64]]) -> Difference:
    count = len(differences)
    estimate = float(differences.mean())
    if count < 2:
        return {"estimate": estimate, "low": None, "high": None, "samples": count}
    random = np.random.default_rng(0)
    shares = np.full(count, 1 / count)
    means = [random.multinomial(count, shares, size=_AT_ONCE) @ differences / count for _ in range(DRAWS // _AT_ONCE)]
    found: Interval = interval(estimate, np.concatenate(means))
    return {"estimate": estimate, "low": found.low, "high": found.high, "samples": count}


def beyond_noise(difference: Mapping[str, Any]) -> bool:
    """Whether the 95 % interval of a difference excludes 0, over at least ten samples."""
    low, high = difference["low"], difference["high"]
    return difference["samples"] >= FEW_GROUPS and low is not None and high is not None and (low > 0 or high < 0)
