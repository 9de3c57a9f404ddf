"""Attention of the tips of a sequence over its one set of keys and values, which no head and no branch copies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cocoa_engine.forward.base import Segment

FOLDED_WIDTH = 32
"""Up to this many tokens the query heads of a key-value head are folded into the query's length."""


def attend(
    segment: Segment, layer: int, query: Tensor, *, scale: float, window: int | None, softcap: float | None = None
) -> Tensor:
    """softmax(q k^T * scale + mask) v of one segment, whose keys and values have been written.

    Args:
        query: ``[W, heads, head_dim]``.
        window: of a layer with sliding attention.
        softcap: c in c * tanh(score / c), as in Gemma 2.

    Returns:
        ``[W, heads * value_dim]``.
    """
    width, heads, _ = query.shape
    keys, values = segment.store.read(layer, segment.end)  # [G, S, head_dim]
    groups = heads // keys.shape[0]
    device = query.device
    if width > FOLDED_WIDTH and softcap is None:
        causal = segment.is_prompt(window)
        mask = None if causal else segment.mask(window, 1, query.dtype, device)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return out[0].transpose(0, 1).reshape(width, -1)
    mask = segment.mask(window, groups, query.dtype, device)
    return attend_folded(query, keys, values, mask, scale=scale, softcap=softcap)


def attend_folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The same for few tokens: the query heads of a key-value head are folded into the query's length.

    Args:
        query: ``[W, heads, head_dim]``.
        keys, values: ``[kv_heads, S, head_dim]``.
        mask: additive, ``[heads / kv_heads * W, S]``; none sees everything.

    Returns:
        ``[W, heads * value_dim]``.
    """
    groups = query.shape[1] // keys.shape[0]
    folded = _folded(query, groups)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    else:
        scores = softcap * torch.tanh(folded @ keys.transpose(1, 2) * (scale / softcap))  # [G, groups * W, S]
        scores = scores if mask is None else scores + mask
        out = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values
    return _unfolded(out, groups)


def _folded(query: Tensor, groups: int) -> Tensor:
    """``[W, G * groups, head_dim]`` to ``[G, groups * W, head_dim]``."""
    width, heads, head_dim = query.shape
    return query.view(width, -1, groups, head_dim).permute(1, 2, 0, 3).reshape(heads // groups, -1, head_dim)


def _unfolded(out: Tensor, groups: int) -> Tensor:
    """``[G, groups * W, value_dim]`` to ``[W, G * groups * value_dim]``."""
    width = out.shape[1] // groups
    return out.view(-1, groups, width, out.shape[-1]).permute(2, 0, 1, 3).reshape(width, -1)
