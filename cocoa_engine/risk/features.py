"""What of a span its risk is worked out from: plain numbers, from a decoded span or from a given text alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from cocoa_engine.results import Candidate

MARGIN_CAP = 20.0
"""Margins above it, in nats, count as this; an infinite one (a single allowed token) could not be weighed."""

FEATURES = (
    "con_mlds",
    "f_mlds",
    "mean_log_prob",
    "min_log_prob",
    "entropy",
    "margin",
    "mean_entropy",
    "candidates",
    "candidate_spread",
    "log_tokens",
)
"""In this order: both MLDS; log p of its tokens, mean and lowest; entropy and margin where the span begins (the risk
point), and the mean entropy; how many tokens competed there, and log p of the best of these less that of the last; log
of the number of tokens. Logarithms are natural, entropies in nats."""


class SpanFigures(Protocol):
    """What was measured of a span, decided or reported."""

    @property
    def con_mlds(self) -> float: ...

    @property
    def f_mlds(self) -> float: ...

    @property
    def token_log_probs(self) -> list[float]: ...

    @property
    def token_entropies(self) -> list[float]: ...

    @property
    def token_margins(self) -> list[float]: ...

    @property
    def candidates(self) -> list[Candidate]: ...


def span_features(span: SpanFigures) -> list[float]:
    """The features of a span, in the order of :data:`FEATURES`."""
    first = [candidate.token_log_probs[0] for candidate in span.candidates]
    return features(
        span.con_mlds,
        span.f_mlds,
        span.token_log_probs,
        span.token_entropies,
        span.token_margins,
        candidates=max(1, len(first)),
        spread=max(first) - min(first) if first else 0.0,
    )


def features(
    con_mlds: float,
    f_mlds: float,
    log_probs: Sequence[float],
    entropies: Sequence[float],
    margins: Sequence[float],
    *,
    candidates: int,
    spread: float,
) -> list[float]:
    """The features from what was measured of a span of t tokens.

    Args:
        log_probs, entropies, margins: of each token, ``[t]``.
        candidates: how many tokens competed where it begins, 1 in a greedy run.
        spread: log p of the most probable of them less that of the least probable.
    """
    count = len(log_probs)
    return [
        con_mlds,
        f_mlds,
        sum(log_probs) / count,
        min(log_probs),
        entropies[0],
        min(margins[0], MARGIN_CAP),
        sum(entropies) / count,
        float(candidates),
        spread,
        math.log(count),
    ]
