"""Log-probabilities, entropies and margins of tokens, computed from logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_NOTHING = -1e4
"""Replaces differences of -inf from the best logit: e^-10000 is 0 in float32, so products are 0; 0 * -inf is NaN."""


class RowStatistics(NamedTuple):
    """Statistics of W next-token distributions, in float32. Logarithms are natural."""

    log_sum: Tensor  # [W], log of the sum of e^logits
    entropy: Tensor  # [W], -sum of p log p, in nats; a forbidden token (logit -inf) adds nothing


def row_statistics(logits: Tensor, best: Tensor) -> RowStatistics:
    """Log-normalizer and entropy of each row of logits.

    With x = logits - best and Z = sum(e^x), the entropy is log Z - sum(x e^x) / Z. This form stays accurate if one
    token has nearly all of the probability. (torch's softmax kernels sum less accurately than ``sum``.) It is
    :func:`.equations.entropy` for the decode loop: the log-probabilities of all tokens are not needed for it.

    Args:
        logits: ``[W, V]`` float32.
        best: ``[W]``, the highest logit of each row.
    """
    below = (logits - best[:, None]).contiguous()  # BLAS sums strided rows less exactly
    weights = below.exp()
    total = weights.sum(dim=1)
    products = _row_products(weights, below)
    # NaNs are looked for on the CPU only: on a GPU the test needs a synchronization, which costs more than the clamp
    if logits.device.type != "cpu" or products.isnan().any():
        products = _row_products(weights, below.clamp_(min=_NOTHING))
    log_total = total.log()
    return RowStatistics(best + log_total, (log_total - products / total).clamp_(min=0))


def _row_products(left: Tensor, right: Tensor) -> Tensor:
    """Dot product of each pair of rows, ``[W]``: one BLAS call per row on a CPU, one kernel for all rows on a GPU."""
    if left.device.type == "cpu":
        return torch.stack([torch.dot(a, b) for a, b in zip(left, right, strict=True)])
    return torch.linalg.vecdot(left, right)


class TokenStatistics(NamedTuple):
    """Statistics of t tokens: their log-probabilities, and the entropies and margins of their distributions."""

    log_probs: list[float]
    entropies: list[float]
    margins: list[float]


def token_statistics(logits: Tensor, token_ids: Tensor, rows: Tensor) -> TokenStatistics:
    """Log-probability of each token, and entropy and margin of the distribution that predicts it.

    Args:
        logits: ``[W, V]``.
        token_ids: ``[t]``.
        rows: ``[t]``, for each token, the row of ``logits`` that predicts it.
    """
    logits = logits.float()
    best = logits.topk(min(2, logits.shape[1]), dim=1).values  # [W, 2]
    log_sum, entropy = row_statistics(logits, best[:, 0])
    log_probs = (logits[rows, token_ids] - log_sum[rows]).clamp(max=0)
    margin = best[:, 0] - best[:, -1]
    return TokenStatistics(*torch.stack([log_probs, entropy[rows], margin[rows]]).tolist())


def most_probable(logits: Tensor, rows: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The most probable tokens where each token is predicted, as ids with log-probabilities, most probable first;
    equally probable ones by ascending id.

    A token has exactly the log-probability that :func:`token_statistics` gives it.

    Args:
        logits: ``[W, V]``.
        rows: ``[t]``, for each token, the row of ``logits`` that predicts it.
        count: the number of tokens, at least 1.
    """
    logits = logits.float()
    count = min(count, logits.shape[1])
    best = logits.topk(min(count + 1, logits.shape[1]), dim=1)  # [W, K]
    log_sum = row_statistics(logits, best.values[:, 0]).log_sum
    log_probs = (best.values - log_sum[:, None]).clamp(max=0).tolist()
    columns = zip(logits, best.values.tolist(), best.indices.tolist(), log_probs, strict=True)
    ranked = [list(zip(ids_by_rank(row, top, ids, count), ps, strict=False)) for row, top, ids, ps in columns]
    return [ranked[row] for row in rows.tolist()]


def ids_by_rank(logits: Tensor, values: list[float], token_ids: list[int], count: int) -> list[int]:
    """The ids of the ``count`` highest logits of a row, highest first; equal logits by ascending id.

    Args:
        logits: ``[V]``.
        values, token_ids: from ``topk``, which takes any of equal logits: one more than ``count``, to show whether the
            last one is tied with one that is left out.
    """
    if len(values) > count and values[count - 1] == values[count] > -math.inf:
        tied = (logits == values[count]).nonzero()[:count, 0].tolist()
        token_ids = [*token_ids[: values.index(values[count])], *tied]
    return [token_ids[rank] for rank in sorted(range(count), key=lambda rank: (-values[rank], token_ids[rank]))]
