"""All decoder layers of the Llama family over a few tokens, in one call of the kernels.

What a step has to do beside its matrix products is little, but as operators of torch's, some twenty of them a layer,
they take as long as a quarter of the products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocoa_engine.execution.native import operators, structures

MOST_ROWS = 48
"""Tokens of a pass, no more than ``MANY_ROWS`` in kernels.cpp: beyond that products are not added to what is there."""

Taps = Sequence[tuple[int, int]]
"""(layer, address): where the states before that layer go, ``[T, d]`` float32.

As if they were layers, the number of layers stands for the states after the last one, and one more for those after the
norm.
"""


class DecoderLayer(NamedTuple):
    """One layer's weights, those of the norms in float32 on the CPU.

    Attributes:
        attention_norm, mlp_norm: ``[d]``.
        q_norm, k_norm: ``[head_dim]``, or none.
        windowed: whether it looks back a window's length only.
    """

    attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    qkv: operators.Linears
    out: operators.Linears
    gate_up: operators.Linears
    down: operators.Linears
    windowed: bool


class Places:
    """Where every layer has the keys and values of a sequence.

    Args:
        keys, values: of each layer ``[kv_heads, S, head_dim]``, such as :func:`reachable` says.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        pointers = ctypes.c_void_p * len(keys)
        self.keys = pointers(*(each.data_ptr() for each in keys))
        self.values = pointers(*(each.data_ptr() for each in values))
        self.kv_head = keys[0].stride(0)
        self._kv_heads, _, self._head_dim = keys[0].shape

    def move(self, slots: Sequence[int], start: int) -> None:
        """Move slots down to ``start``, in order. They lie at or after their new places."""
        count = len(slots)
        operators.handle().cocoa_move(
            self.keys,
            self.values,
            len(self.keys),
            self._kv_heads,
            self.kv_head,
            self._head_dim,
            (ctypes.c_long * count)(*slots),
            count,
            start,
        )


def reachable(keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> bool:
    """Whether :class:`Places` can say where these are: float32, on the CPU, one layer like the other."""
    known = [each for each in (*keys, *values) if each is not None]
    return (
        len(known) == len(keys) + len(values)
        and len({(each.stride(), each.shape[0], each.dtype, each.device.type) for each in known}) == 1
        and operators.readable(known[0])
        and known[0].stride(1) == known[0].shape[2]
    )


class Tips(NamedTuple):
    """The tokens of one sequence.

    Attributes:
        start, tokens: so many take the slots from ``start`` on.
        masks: in a layer without and with a window: additive, ``[tokens, start + tokens - n]`` or none, and n, the
            slots below which every token sees.
    """

    places: Places
    start: int
    tokens: int
    masks: tuple[tuple[Tensor | None, int], tuple[Tensor | None, int]]


class Layers:
    """The layers of a model and the norm after them.

    Args:
        norm: ``[d]``, in float32 on the CPU.

    Attributes:
        count: of the layers.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
    ) -> None:
        described = (structures.DecoderLayer * len(layers))(*(_described(layer) for layer in layers))
        self._kept = (layers, described, norm)  # the addresses below are theirs
        self.count = len(layers)
        sizes = (self.count, norm.shape[0], heads, kv_heads, head_dim, layers[0].gate_up.total // 2)
        self._stack = structures.Stack(*sizes, eps, scale, ctypes.addressof(described), norm.data_ptr())
        self._kv_heads = kv_heads

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequence[Tips], taps: Taps) -> None:
        """Run them, and write the tokens' keys and values.

        Args:
            x: ``[T, d]``, used up; at most :data:`MOST_ROWS` tokens.
            cos, sin: ``[T, head_dim]``, the latter with rotate_half's sign. All three are float32 without gaps.
            sequences: whose tokens they are, in order.
        """
        threads = torch.get_num_threads()
        tips = (structures.Tips * len(sequences))(
            *(
                structures.Tips(
                    ctypes.addressof(each.places.keys),
                    ctypes.addressof(each.places.values),
                    each.places.kv_head,
                    each.start,
                    each.tokens,
                    tuple(None if mask is None else mask.data_ptr() for mask, _ in each.masks),
                    tuple(masked_from for _, masked_from in each.masks),
                    operators.parts(threads, self._kv_heads, each.start + each.tokens),
                )
                for each in sequences
            )
        )
        operators.handle().cocoa_layers(
            ctypes.byref(self._stack),
            tips,
            len(sequences),
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            (structures.Tap * len(taps))(*(structures.Tap(*tap) for tap in taps)),
            len(taps),
            threads,
        )


def _described(layer: DecoderLayer) -> structures.DecoderLayer:
    norms: list[Any] = [layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm]
    addresses = [None if norm is None else norm.data_ptr() for norm in norms]
    linears = [each.joined for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return structures.DecoderLayer(*addresses, *linears, layer.windowed)
