"""All decoder layers of the Llama family in one kernel call, for a few tokens.

Apart from its matrix products, a step does little work. With torch operators, about twenty per layer, that work would
take a quarter of the time of the matrix products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocoa_engine.execution.native import operators, structures
from cocoa_engine.execution.native.operators import untraced

MAX_ROWS = 48
"""Maximum number of tokens in one pass. It must not exceed ``MANY_ROWS`` in kernels.cpp: with more rows, the kernel
cannot add products to existing outputs."""

Taps = Sequence[tuple[int, int]]
"""Pairs (layer, address): the states before the layer are copied to the address, as ``[T, d]`` float32.

With L layers, the number L means the states after the last layer, and L + 1 the states after the norm.
"""


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """The weights of one layer. Norm weights are float32 on the CPU.

    Attributes:
        attention_norm, mlp_norm: ``[d]``.
        q_norm, k_norm: ``[head_dim]`` or ``None``.
        windowed: whether the layer has a sliding window.
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

    def structure(self) -> structures.DecoderLayer:
        """The layer as the kernels read it. The addresses are valid while this object lives."""
        return structures.DecoderLayer(
            attention_norm=self.attention_norm.data_ptr(),
            q_norm=_address(self.q_norm),
            k_norm=_address(self.k_norm),
            mlp_norm=self.mlp_norm.data_ptr(),
            qkv=self.qkv.joined,
            out=self.out.joined,
            gate_up=self.gate_up.joined,
            down=self.down.joined,
            windowed=self.windowed,
        )


class KeyValuePointers:
    """The addresses of one sequence's keys and values in every layer.

    Args:
        keys, values: by layer, each ``[kv_heads, S, head_dim]``; :func:`is_addressable` must accept them.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        array = ctypes.c_void_p * len(keys)
        self.keys = array(*(each.data_ptr() for each in keys))
        self.values = array(*(each.data_ptr() for each in values))
        self.kv_head = keys[0].stride(0)
        self._kv_heads, _, self._head_dim = keys[0].shape

    def move(self, slots: Sequence[int], start: int) -> None:
        """Move slots to the slots from ``start`` on, in order. No slot may be below its target."""
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


def is_addressable(keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> bool:
    """Whether :class:`KeyValuePointers` supports these: float32 on the CPU, with the same layout in every layer."""
    known = [each for each in (*keys, *values) if each is not None]
    return (
        len(known) == len(keys) + len(values)
        and len({(each.stride(), each.shape[0], each.dtype, each.device.type) for each in known}) == 1
        and operators.is_readable(known[0])
        and known[0].stride(1) == known[0].shape[2]
    )


class Mask(NamedTuple):
    """An attention mask that leaves out the first slots.

    Attributes:
        values: additive, ``[tokens, start + tokens - first]`` float32, or ``None`` if every token sees all slots.
        first: every token sees the slots below it.
    """

    values: Tensor | None
    first: int


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """The tokens that one sequence feeds.

    Attributes:
        pointers: the addresses of the sequence's keys and values.
        start: the first slot that the tokens are written to.
        tokens: the number of tokens.
        full_mask, window_mask: for layers without and with a sliding window.
        source: the slots of the source, for source attention.
        passages: the slots of each passage.
    """

    pointers: KeyValuePointers
    start: int
    tokens: int
    full_mask: Mask
    window_mask: Mask
    source: range | None = None
    passages: Sequence[range] = ()

    @cached_property
    def ranges(self) -> Any:
        """The slots of the source and of each passage, as pairs (first, end)."""
        measured = (self.source or range(0), *self.passages)
        return (ctypes.c_long * (2 * len(measured)))(*(end for one in measured for end in (one.start, one.stop)))

    def structure(self, parts: int) -> structures.Leaves:
        """The leaves as the kernels read them. The addresses are valid while this object lives."""
        return structures.Leaves(
            keys=ctypes.addressof(self.pointers.keys),
            values=ctypes.addressof(self.pointers.values),
            kv_head=self.pointers.kv_head,
            start=self.start,
            count=self.tokens,
            mask=(_address(self.full_mask.values), _address(self.window_mask.values)),
            masked_from=(self.full_mask.first, self.window_mask.first),
            parts=parts,
            ranges=ctypes.addressof(self.ranges),
            range_count=1 + len(self.passages),
        )


class Layers:
    """The decoder layers of a model and the norm after them.

    Args:
        layers: the weights of the layers, in order.
        norm: weight of the norm after the last layer, ``[d]``, float32 on the CPU.
        heads, kv_heads, head_dim: the shape of the attention.
        eps: epsilon of all norms.
        scale: factor of the attention scores.

    Attributes:
        count: number of layers.
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
        array = (structures.DecoderLayer * len(layers))(*(layer.structure() for layer in layers))
        self._kept = (layers, array, norm)  # keeps the memory behind the addresses alive
        self.count = len(layers)
        self._stack = structures.Stack(
            layers=self.count,
            width=norm.shape[0],
            heads=heads,
            kv_heads=kv_heads,
            dim=head_dim,
            inner=layers[0].gate_up.total // 2,
            eps=eps,
            scale=scale,
            layer=ctypes.addressof(array),
            norm=norm.data_ptr(),
        )
        self._kv_heads = kv_heads

    @untraced
    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        sequences: Sequence[Leaves],
        taps: Taps,
        source_heads: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        """Run the layers and write the tokens' keys and values.

        Args:
            x: ``[T, d]``, at most :data:`MAX_ROWS` tokens. Its memory is overwritten.
            cos, sin: ``[T, head_dim]``; ``sin`` carries the sign of rotate_half. All three are contiguous float32.
            sequences: the leaves of each sequence, in the order of the rows of ``x``.
            taps: the states to copy, and where to.
            source_heads: (layer, head) pairs whose attention on the source is measured.

        Returns:
            ``[source_heads, 1 + P, T]``: the share of the attention of each head and token that is on the source of its
            sequence, and on each of the sequence's passages; 0 for passages that the sequence does not have.
        """
        columns = 1 + max((len(each.passages) for each in sequences), default=0)
        masses = x.new_zeros(len(source_heads), columns, x.shape[0])
        threads = torch.get_num_threads()
        leaves = (structures.Leaves * len(sequences))(
            *(each.structure(operators.parts(threads, self._kv_heads, each.start + each.tokens)) for each in sequences)
        )
        operators.handle().cocoa_layers(
            ctypes.byref(self._stack),
            leaves,
            len(sequences),
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            (structures.Tap * len(taps))(*(structures.Tap(layer=layer, to=address) for layer, address in taps)),
            len(taps),
            (structures.Head * len(source_heads))(*(structures.Head(*each) for each in source_heads)),
            len(source_heads),
            masses.data_ptr(),
            columns,
            threads,
        )
        return masses


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
