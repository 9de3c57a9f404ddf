"""Source attention: how much of its attention a token puts on the source, in the heads that copy from the context.

The source is the prompt. Passages are parts of it whose mass is measured as well.

The mass is recomputed from the query and the cached keys of a few heads, because fused attention returns no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

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
        inside: the slots of the source, as a slice or as booleans ``[S]``.

    The other arguments are those of :func:`attention_weights`.
    """
    weights = attention_weights(query, keys, heads, visible, scale=scale, softcap=softcap)
    of_source = weights[..., inside] if isinstance(inside, slice) else weights * inside
    return of_source.sum(dim=-1).sum(dim=0)


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
    """

    def __init__(self, heads: Heads, source: range, passages: Sequence[range] = ()) -> None:
        self.source = source
        self.passages = tuple(passages)
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
        scale: float,
        heads: Sequence[int] | None = None,
        first: int = 0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Add the heads of one layer; further arguments as for :func:`attention_weights`.

        Args:
            heads: those of the layer's heads that are added. Default: all that count.
            first: the position of the first key.
        """
        heads = self.heads_of(layer) if heads is None else heads
        weights = attention_weights(query, keys, heads, visible, scale=scale, softcap=softcap, sinks=sinks)
        self.take(layer, weights, first)

    def take(self, layer: int, weights: Tensor, first: int) -> None:
        """Take the weights of one layer.

        Args:
            layer: its number.
            weights: ``[heads, W, S]`` float32.
            first: the position of the first of the S keys.
        """
        ranges = [slice(max(0, one.start - first), max(0, one.stop - first)) for one in (self.source, *self.passages)]
        mass = torch.stack([weights[..., one].sum(dim=-1).sum(dim=0) for one in ranges])
        self._total = mass if self._total is None else self._total + mass.to(self._total.device)
        self._measured += len(weights)

    def mean(self) -> Tensor | None:
        """The mass on the source, the mean over the heads added, ``[W]`` float32; `None` if no layer was added."""
        return None if self._total is None else self._total[0] / self._measured

    def of_passages(self) -> Tensor | None:
        """The same for each passage, ``[W, passages]``; `None` if there are none, or if no layer was added."""
        return None if self._total is None or not self.passages else self._total[1:].T / self._measured


def probe_of(heads: Heads, prompt_tokens: int, passages: Sequence[range] = ()) -> SourceProbe | None:
    """The probe of a prompt: its first token attracts attention whatever it is, and is no part of the source.

    The result is `None` without heads, and for a prompt of one token.
    """
    source = range(1, prompt_tokens)
    return SourceProbe(heads, source, passages) if heads and source else None


def of_segments(probes: Sequence[tuple[SourceProbe | None, int]]) -> tuple[Tensor | None, Tensor | None]:
    """The attention of all tokens of a pass on their source, ``[T]``, and on each of its passages, ``[T, P]``.

    P is the largest number of passages of a segment. Further columns of a segment with fewer passages are 0. Either
    result is `None` if nothing was measured, the second one also if no segment has passages.

    Args:
        probes: the probe of each segment and its number of tokens. Segments without a probe get zeros.
    """
    return _means(probes), _of_passages(probes)


def _means(probes: Sequence[tuple[SourceProbe | None, int]]) -> Tensor | None:
    means = [None if probe is None else probe.mean() for probe, _ in probes]
    known = next((mean for mean in means if mean is not None), None)
    if known is None:
        return None
    return torch.cat(
        [known.new_zeros(width) if mean is None else mean for mean, (_, width) in zip(means, probes, strict=True)]
    )


def _of_passages(probes: Sequence[tuple[SourceProbe | None, int]]) -> Tensor | None:
    found = [None if probe is None else probe.of_passages() for probe, _ in probes]
    known = [one for one in found if one is not None]
    if not known:
        return None
    most = max(one.shape[1] for one in known)
    rows = [
        known[0].new_zeros(width, most) if one is None else F.pad(one, (0, most - one.shape[1])).to(known[0].device)
        for one, (_, width) in zip(found, probes, strict=True)
    ]
    return torch.cat(rows)
