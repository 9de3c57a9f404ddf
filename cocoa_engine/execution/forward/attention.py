"""Attention of one sequence's leaves over its keys and values, without copies for query heads or branches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.forward.source_attention import attention_weights
from cocoa_engine.execution.native import operators

FOLDED_WIDTH = 32
"""Up to this number of tokens, the query heads of a key-value head are folded into the query's length."""


def write_all(segments: Sequence[Segment], layer: int, keys: Tensor, values: Tensor) -> None:
    """Write the packed keys and values of a pass, ``[kv_heads, T, head_dim]``, to the stores of their segments."""
    start = 0
    for segment in segments:
        end = start + segment.width
        segment.store.write(layer, segment.start, keys[:, start:end], values[:, start:end])
        start = end


def attend_all(segments: Sequence[Segment], layer: int, query: Tensor, **options: Any) -> Tensor:
    """:func:`attend` for the packed queries of a pass, ``[heads, T, head_dim]``; ``[T, heads * value_dim]``."""
    rows, start = [], 0
    for segment in segments:
        rows.append(attend(segment, layer, query[:, start : start + segment.width], **options))
        start += segment.width
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def attend(
    segment: Segment,
    layer: int,
    query: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    native: bool = False,
) -> Tensor:
    """softmax(q k^T * scale + mask) v for one segment, ``[heads, W, head_dim]`` -> ``[W, heads * value_dim]``.

    Its keys and values must have been written.

    Args:
        window: size of the layer's sliding window, if it has one.
        softcap: c in c * tanh(score / c), as in Gemma 2.
        native: use the native kernel for few tokens.
    """
    heads, width, _ = query.shape
    if masked := segment.masked.get(layer):
        query = query.index_fill(0, torch.tensor(masked, device=query.device), 0)  # a zero query attends uniformly
    keys, values = segment.store.read(layer, segment.end)  # [G, S, head_dim]
    groups = heads // keys.shape[0]
    if segment.source is not None and (measured := segment.source.heads_of(layer)):
        visible = segment.mask(window, 1, query.dtype, query.device)
        weights = attention_weights(query, keys, measured, visible, scale=scale, softcap=softcap)
        segment.source.take(layer, weights, 0)
    if width > FOLDED_WIDTH and softcap is None:
        causal = segment.is_prompt(window)
        mask = None if causal else segment.mask(window, 1, query.dtype, query.device)
        out = F.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return out[0].transpose(0, 1).reshape(width, -1)
    if native and softcap is None and operators.can_attend(query, keys, values):
        return operators.attend(query, keys, values, *segment.tail_mask(window), scale=scale)
    mask = segment.mask(window, groups, query.dtype, query.device)
    return attend_folded(query, keys, values, mask, scale=scale, softcap=softcap)


def attend_folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None = None
) -> Tensor:
    """:func:`attend` with the query heads of a key-value head folded into the query's length, which suits few tokens.

    ``mask`` is additive, ``[heads / kv_heads * W, S]``, or ``None`` if every token sees all slots.
    """
    (heads, width, head_dim), kv_heads = query.shape, keys.shape[0]
    folded = query.reshape(kv_heads, -1, head_dim)  # [G, groups * W, head_dim]; no copy of a contiguous query
    if softcap is None:
        out = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    else:
        scores = softcap * torch.tanh(folded @ keys.transpose(1, 2) * (scale / softcap))  # [G, groups * W, S]
        scores = scores if mask is None else scores + mask
        out = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values
    return out.view(kv_heads, heads // kv_heads, width, -1).permute(2, 0, 1, 3).reshape(width, -1)
