"""Source attention: how much of its attention a token puts on the source, in the heads that copy from the context.

The source is the prompt. Passages are parts of it whose mass is measured as well.

The mass is recomputed from the query and the cached keys of a few heads, because fused attention returns no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Heads = Sequence[tuple[int, int]]
"""(layer, head) pairs, both counted from 0."""


def attention_weights(
    query: Tensor,
    keys: Tensor,
    heads: Sequence[int],
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of W tokens on S slots in some heads of one layer: ``[len(heads), W, S]`` float32.

    Args:
        query: ``[heads, W, head_dim]``, of all heads of the layer.
        keys: ``[kv_heads, S, head_dim]``.
        heads: the heads that count.
        visible: additive mask ``[W, S]``, or ``[len(heads), W, S]``; `None` if every token sees all slots.
        scale: factor of the scores.
        softcap: c in c * tanh(score / c), as in Gemma 2.
        sinks: ``[heads]``, the scores of the heads' attention sinks, which take their share, as in gpt-oss; or
            ``[heads, W, 1]``, those of each token.
    """
    groups = query.shape[0] // keys.shape[0]
    # one product for each head, because a batch of them would need a copy of the keys
    scores = torch.stack([query[head] @ keys[head // groups].T for head in heads]) * scale  # [n, W, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores + visible
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    of_sinks = torch.stack([sinks[head] for head in heads]).to(scores.dtype).view(len(heads), -1, 1)
    scores = torch.cat([scores, of_sinks.expand(-1, scores.shape[1], 1)], dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32)[..., :-1]


class SourceProbe:
    """Measures the source attention of one segment while its layers run.

    Args:
        heads: the heads that count.
        source: the slots of the source. They are committed, so every token may see them.
        passages: the slots of each passage.

    Attributes:
        slots: the slots of the source, then of each passage.
    """

    def __init__(self, heads: Heads, source: range, passages: Sequence[range] = ()) -> None:
        self.slots = (source, *passages)
        self._by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            self._by_layer.setdefault(layer, []).append(head)
        self._total: Tensor | None = None
        self._measured = 0  # heads

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
        heads: Sequence[int] | None = None,
        first: int = 0,
        **options: Any,
    ) -> None:
        """Add the heads of one layer; further arguments as for :func:`attention_weights`.

        Args:
            heads: those of the layer's heads that are added. Default: all that count.
            first: the position of the first key.
        """
        heads = self.heads_of(layer) if heads is None else heads
        self.take(layer, attention_weights(query, keys, heads, visible, **options), first)

    def take(self, layer: int, weights: Tensor, first: int) -> None:
        """Take the weights of one layer.

        Args:
            layer: its number.
            weights: ``[heads, W, S]`` float32.
            first: the position of the first of the S keys.
        """
        columns = [slice(max(0, slots.start - first), max(0, slots.stop - first)) for slots in self.slots]
        mass = torch.stack([weights[..., column].sum(dim=-1).sum(dim=0) for column in columns])
        self._total = mass if self._total is None else self._total + mass.to(self._total.device)
        self._measured += len(weights)

    def means(self) -> Tensor | None:
        """The mass on the source and on each passage, the mean over the heads added, ``[W, 1 + P]`` float32.

        `None` if no layer was added.
        """
        return None if self._total is None else self._total.T / self._measured


def probe_of(heads: Heads, prompt_tokens: int, passages: Sequence[range] = ()) -> SourceProbe | None:
    """The probe of a prompt: its first token attracts attention whatever it is, and is no part of the source.

    The result is `None` without heads, and for a prompt of one token.
    """
    source = range(1, prompt_tokens)
    return SourceProbe(heads, source, passages) if heads and source else None


def of_segments(probes: Sequence[tuple[SourceProbe | None, int]]) -> Tensor | None:
    """The attention of all tokens of a pass on their source and on each of its passages, ``[T, 1 + P]``.

    P is the largest number of passages of a segment. Further columns of a segment with fewer passages are 0. The result
    is `None` if nothing was measured.

    Args:
        probes: the probe of each segment and its number of tokens. Segments without a probe get zeros.
    """
    means = [None if probe is None else probe.means() for probe, _ in probes]
    measured = [mean for mean in means if mean is not None]
    if not measured:
        return None
    none, columns = measured[0].new_zeros(1, 1), max(mean.shape[1] for mean in measured)
    rows = [
        none.expand(width, columns) if mean is None else F.pad(mean, (0, columns - mean.shape[1])).to(none.device)
        for mean, (_, width) in zip(means, probes, strict=True)
    ]
    return torch.cat(rows)
