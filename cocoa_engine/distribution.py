"""Next-token distributions from logits: log-probabilities, entropy and margin, all in one pass over the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_NOTHING = -1e4
"""Stands in for -inf below the best logit: e^-10000 is 0 in float32, and 0 times it is 0, where 0 * inf is NaN."""


class Distributions(NamedTuple):
    """W next-token distributions, float32, logarithms natural."""

    log_sum: Tensor  # [W], log of the sum of e^logits
    entropy: Tensor  # [W], -sum of p log p, in nats; a forbidden token (logit -inf) adds nothing


def distributions(logits: Tensor, best: Tensor) -> Distributions:
    """What normalises each row of logits, and how spread it is.

    With x = logits - best and Z the sum of e^x, the entropy is log Z - sum(x e^x) / Z: hardly anything is lost to
    rounding where one token has nearly all of the probability.

    Args:
        logits: ``[W, V]`` float32.
        best: ``[W]``, the highest of each row.
    """
    if logits.device.type == "cpu":  # a row at a time stays in the cache; on a GPU each would be a launch
        sums = torch.stack([_sums(row, top, dim=0) for row, top in zip(logits, best, strict=True)])
    else:
        sums = _sums(logits, best[:, None], dim=1)
    log_total = sums[:, 0].log()
    return Distributions(best + log_total, (log_total - sums[:, 1] / sums[:, 0]).clamp_(min=0))


def _sums(logits: Tensor, best: Tensor, dim: int) -> Tensor:
    """The sums of e^x and of x e^x, ``[..., 2]``."""
    below = (logits - best).clamp_(min=_NOTHING)
    weights = below.exp()
    return torch.stack([weights.sum(dim=dim), below.mul_(weights).sum(dim=dim)], dim=-1)


class TokenFigures(NamedTuple):
    """Of each of t tokens, and of the distributions they were chosen from."""

    log_probs: list[float]
    entropies: list[float]
    margins: list[float]


def token_figures(logits: Tensor, token_ids: Tensor, rows: Tensor) -> TokenFigures:
    """Log-probability of some tokens, and entropy and margin of the distribution each is taken from.

    Args:
        logits: ``[W, V]``.
        token_ids: ``[t]``.
        rows: ``[t]``, the row of ``logits`` that predicts each.
    """
    logits = logits.float()
    best = logits.topk(min(2, logits.shape[1]), dim=1).values  # [W, 2]
    log_sum, entropy = distributions(logits, best[:, 0])
    log_probs = (logits[rows, token_ids] - log_sum[rows]).clamp(max=0)
    margin = best[:, 0] - best[:, -1]
    return TokenFigures(*torch.stack([log_probs, entropy[rows], margin[rows]]).tolist())
