"""The paper's paired test (its appendix on statistical significance): Wilcoxon's signed-rank test and effect size r."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cocoa_engine.errors import DataError
from cocoa_engine.lab.record import PairedRecord
from cocoa_engine.optional import need


class PairedTest(NamedTuple):
    """Wilcoxon's signed-rank test on N pairs, with the direction of the difference.

    Attributes:
        pairs: N.
        z: the statistic of the normal approximation, positive if the supported answers score higher.
        effect_size: r = abs(Z) / sqrt(N).
        p_two_sided: the two-sided p value, as the paper reports it, which does not show the direction.
        p_right: the one-sided p value that supported answers score higher.
        right: the share of pairs whose supported answer scores higher; ties count half.
    """

    pairs: int
    z: float
    effect_size: float
    p_two_sided: float
    p_right: float
    right: float

    def record(self) -> PairedRecord:
        """The test as plain data."""
        return {
            "pairs": self.pairs,
            "z": self.z,
            "effect_size": self.effect_size,
            "p_two_sided": self.p_two_sided,
            "p_right": self.p_right,
            "right": self.right,
        }


def paired_test(supported: Sequence[float], hallucinated: Sequence[float]) -> PairedTest:
    """Whether supported answers score higher than hallucinated ones to the same prompts.

    Args:
        supported, hallucinated: scores of N pairs, higher is better.

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
