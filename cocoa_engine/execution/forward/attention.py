"""Attention of one sequence's leaves over its keys and values, without copies for query heads or branches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.native import operators

FOLDED_WIDTH = 32
"""Up to this number of tokens, the query heads of a key-value head are folded into the query's length."""

LONG = 768
"""From this number of slots on, CPU threads also divide the slots if the key-value heads cannot be divided evenly."""

_flash: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


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
    """softmax(q k^T * scale + mask) v for one segment. Its keys and values must have been written.

    Args:
        segment: the tokens, and the slots that they see.
        layer: the layer, counted from 0.
        query: ``[heads, W, head_dim]``.
        scale: factor of the scores.
        window: size of the layer's sliding window, if it has one.
        softcap: c in c * tanh(score / c), as in Gemma 2.
        native: use the native kernel for few tokens. It must have been built, see ``execution.native``.

    Returns:
        ``[W, heads * value_dim]``.
    """
    heads, width, _ = query.shape
    if masked := segment.masked.get(layer):
        query = query.index_fill(0, torch.tensor(masked, device=query.device), 0)  # a zero query attends uniformly
    keys, values = segment.store.read(layer, segment.end)  # [G, S, head_dim]
    groups = heads // keys.shape[0]
    if segment.source is not None and segment.source.heads_of(layer):
        visible = segment.mask(window, 1, query.dtype, query.device)
        segment.source.add(layer, query, keys, visible, scale=scale, softcap=softcap)
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
    parts = _parts(keys, values) if softcap is None else 1
    end = parts * -(-segment.end // parts)
    if parts > 1 and end <= segment.store.capacity:
        keys, values = segment.store.read(layer, end)
        mask = segment.mask(window, groups, query.dtype, query.device, end)
        return _unfolded(_in_parts(_folded(query, groups), keys, values, mask, scale, parts), groups)
    mask = segment.mask(window, groups, query.dtype, query.device)
    return attend_folded(query, keys, values, mask, scale=scale, softcap=softcap)


def attend_folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention for few tokens, with the query heads of a key-value head folded into the query's length.

    Args:
        query: ``[heads, W, head_dim]``.
        keys, values: ``[kv_heads, S, head_dim]``.
        mask: additive, ``[heads / kv_heads * W, S]``. ``None``: every token sees all slots.

    Returns:
        ``[W, heads * value_dim]``.
    """
    groups = query.shape[0] // keys.shape[0]
    folded = _folded(query, groups)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    else:
        scores = softcap * torch.tanh(folded @ keys.transpose(1, 2) * (scale / softcap))  # [G, groups * W, S]
        scores = scores if mask is None else scores + mask
        out = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values
    return _unfolded(out, groups)


def _parts(keys: Tensor, values: Tensor) -> int:
    """Number of parts to divide the slots into, so that all threads get the same amount of work."""
    if keys.device.type != "cpu" or keys.shape[1] < LONG or keys.shape[2] != values.shape[2] or _flash is None:
        return 1  # GPU kernels divide the slots themselves
    threads = torch.get_num_threads()
    return min(threads // math.gcd(threads, keys.shape[0]), keys.shape[1] // (LONG // 2))


def _in_parts(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, parts: int) -> Tensor:
    """Attention over each part of the slots as a separate head, combined by the weights of the parts.

    With z_i the sum of exp(score) over part i: softmax(scores) v = sum_i z_i / (sum_j z_j) * softmax(scores_i) v_i.

    Args:
        query: ``[G, R, head_dim]``.
        keys, values: ``[G, S, head_dim]``.
        mask: additive, ``[R, S]``.

    Returns:
        ``[G, R, head_dim]``.
    """
    heads, rows, head_dim = query.shape
    divided = (heads, parts, -1, head_dim)
    out, log_sums = _flash(  # [G, parts, R, head_dim], [G, parts, R]
        query[:, None].expand(heads, parts, rows, head_dim),
        keys.view(divided),
        values.view(divided),
        attn_mask=None if mask is None else mask.view(rows, parts, -1).transpose(0, 1)[None],
        scale=scale,
    )
    weights = log_sums.softmax(dim=1)
    return (out * weights[..., None]).sum(dim=1).to(query.dtype)


def _folded(query: Tensor, groups: int) -> Tensor:
    """``[G * groups, W, head_dim]`` to ``[G, groups * W, head_dim]``, without a copy of a contiguous query."""
    return query.reshape(query.shape[0] // groups, -1, query.shape[2])


def _unfolded(out: Tensor, groups: int) -> Tensor:
    """``[G, groups * W, value_dim]`` to ``[W, G * groups * value_dim]``."""
    heads, rows, value_dim = out.shape
    width = rows // groups
    return out.view(heads, groups, width, value_dim).permute(2, 0, 1, 3).reshape(width, -1)


def usual_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The function that computes the attention of a module under one of transformers' implementations."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # slow to import

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    return function
