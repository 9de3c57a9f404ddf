"""Source attention: how much of its attention a token puts on the source, in the heads that copy from the context.

The mass is recomputed from the query and the cached keys of a few heads, because fused attention returns no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Heads = Sequence[tuple[int, int]]
"""(layer, head) pairs, both counted from 0."""


def source_mass(
    query: Tensor,
    keys: Tensor,
    heads: Sequence[int],
    visible: Tensor | None,
    inside: slice | Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The attention mass of W tokens on the source, summed over some heads of one layer: ``[W]`` float32.

    Args:
        query: ``[heads, W, head_dim]``, of all heads of the layer.
        keys: ``[kv_heads, S, head_dim]``.
        heads: the heads that count.
        visible: additive mask ``[W, S]``; `None` if every token sees all slots.
        inside: the slots of the source, as a slice or as booleans ``[S]``.
        scale: factor of the scores.
        softcap: c in c * tanh(score / c), as in Gemma 2.
    """
    groups = query.shape[0] // keys.shape[0]
    own_keys = torch.stack([keys[head // groups] for head in heads])  # [n, S, head_dim]
    scores = torch.stack([query[head] for head in heads]) @ own_keys.transpose(1, 2) * scale  # [n, W, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores + visible
    weights = scores.softmax(dim=-1, dtype=torch.float32)
    of_source = weights[..., inside] if isinstance(inside, slice) else weights * inside
    return of_source.sum(dim=-1).sum(dim=0)


class SourceProbe:
    """Measures the source attention of one segment while its layers run.

    Args:
        heads: the heads that count.
        source: the slots of the source. They are committed, so every token may see them.
    """

    def __init__(self, heads: Heads, source: range) -> None:
        self.source = source
        self._heads = heads
        self._by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            self._by_layer.setdefault(layer, []).append(head)
        self._total: Tensor | None = None

    def heads_of(self, layer: int) -> list[int]:
        """The heads of a layer that count."""
        return self._by_layer.get(layer, [])

    def add(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        visible: Tensor | None,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        """Add the heads of one layer; arguments as for :func:`source_mass`."""
        inside = slice(self.source.start, self.source.stop)
        mass = source_mass(query, keys, self.heads_of(layer), visible, inside, scale=scale, softcap=softcap)
        self._total = mass if self._total is None else self._total + mass.to(self._total.device)

    def mean(self) -> Tensor | None:
        """The mean over all heads, ``[W]`` float32; `None` if no layer was added."""
        return None if self._total is None else self._total / len(self._heads)


def of_segments(probes: Sequence[tuple[SourceProbe | None, int]]) -> Tensor | None:
    """The source attention of all tokens of a pass, ``[T]``; `None` if nothing was measured.

    Args:
        probes: the probe of each segment and its number of tokens. Segments without a probe get zeros.
    """
    means = [None if probe is None else probe.mean() for probe, _ in probes]
    known = next((mean for mean in means if mean is not None), None)
    if known is None:
        return None
    return torch.cat(
        [known.new_zeros(width) if mean is None else mean for mean, (_, width) in zip(means, probes, strict=True)]
    )
