"""The paper's paired test (its appendix on statistical significance): Wilcoxon's signed-rank test and effect size r."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cocoa_engine.errors import DataError
from cocoa_engine.extras import need


class PairedTest(NamedTuple):
    """Wilcoxon's signed-rank test on N pairs, with the sign that its effect size hides.

    Attributes:
        pairs: N.
        z: the normal approximation's statistic; above 0 where the supported answers score higher.
        effect_size: r = abs(Z) / sqrt(N).
        p_two_sided: what the paper reports: it does not say in which direction.
        p_right: one-sided, that supported answers score higher.
        right: share of pairs whose supported answer scores higher; ties count half.
    """

    pairs: int
    z: float
    effect_size: float
    p_two_sided: float
    p_right: float
    right: float


def paired_test(supported: Sequence[float], hallucinated: Sequence[float]) -> PairedTest:
    """Whether supported answers score higher than hallucinated ones to the same prompts.

    Args:
        supported, hallucinated: scores of N pairs, higher is better.

    Raises:
        DataError: there are no pairs, or their scores do not differ at all.
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
