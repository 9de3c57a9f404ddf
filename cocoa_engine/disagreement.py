"""Middle-Layer Disagreement Scores of a span: ConMLDS and fMLDS.

A span's hidden states are first mean-pooled over its tokens, H[S, l] = mean_{i in S} h[i, l]; the scores then
compare the pooled states of layers. Everything runs in float32, whatever the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def middle_layers(num_layers: int) -> tuple[int, int]:
    """The paper's middle window (m, n) = (floor(L / 3), floor(2L / 3)), both inclusive, of a model with L layers."""
    return num_layers // 3, 2 * num_layers // 3


def disagreement(a: Tensor, b: Tensor) -> Tensor:
    """dis(a, b) = 1 - cos(H[S, a], H[S, b]), in [0, 2].

    Args:
        a, b: pooled hidden states, ``[..., d]``.

    Returns:
        ``[...]`` float32. A zero vector disagrees with everything by 1.
    """
    return 1.0 - torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)


def con_mlds(middle: Tensor) -> Tensor:
    """Consecutive-layer score: (1 / N) * sum_{j=m}^{n-1} dis(j, j + 1), with N = n - m + 1.

    The sum has n - m terms and is divided by N = n - m + 1, as printed in the paper.

    Args:
        middle: pooled states of layers m..n, ``[N, ..., d]``.

    Returns:
        ``[...]`` float32, in [0, 2).
    """
    return disagreement(middle[:-1], middle[1:]).sum(dim=0) / middle.shape[0]


def f_mlds(middle: Tensor, final: Tensor) -> Tensor:
    """Final-layer score: (1 / N) * sum_{j=m}^{n} dis(j, L), with N = n - m + 1.

    Args:
        middle: pooled states of layers m..n, ``[N, ..., d]``.
        final: pooled states of layer L, ``[..., d]``.

    Returns:
        ``[...]`` float32, in [0, 2].
    """
    return disagreement(middle, final.unsqueeze(0).expand_as(middle)).sum(dim=0) / middle.shape[0]
