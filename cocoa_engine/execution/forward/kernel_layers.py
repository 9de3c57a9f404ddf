"""All decoder layers of the Llama family in one kernel call, for a few tokens.

Apart from its matrix products, a step does little work. With torch operators, about twenty per layer, that work would
take a quarter of the time of the matrix products.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.forward.source_attention import SourceProbe
from cocoa_engine.execution.native import operators
from cocoa_engine.model.configs import Windows
from cocoa_engine.model.language_model import CaptureSpec

MAX_ROWS = 48
"""Maximum number of tokens in one pass. It must not exceed ``MANY_ROWS`` in kernels.cpp: with more rows, the kernel
cannot add products to existing outputs."""


def decoder_layer(
    norms: Sequence[Tensor | None], linears: Sequence[operators.Linears], windowed: bool
) -> operators.DecoderLayer:
    """One layer as the kernels read it.

    Its norms are before attention, of queries, of keys and before the MLP. Its linear layers are query, key and value
    together; the output of attention; gate and up together; down.
    """
    layer = operators.DecoderLayer(*map(_address, norms), *(linear.joined for linear in linears), windowed)
    layer.memory = norms, linears
    return layer


class KernelLayers:
    """The decoder layers of a model and the norm after them, float32 on the CPU.

    ``inner`` is the width of the MLPs; ``heads`` the numbers of heads and of key-value heads, and the size of a head.
    """

    def __init__(
        self,
        layers: Sequence[operators.DecoderLayer],
        norm: Tensor,
        inner: int,
        windows: Windows,
        heads: tuple[int, int, int],
        eps: float,
        scale: float,
    ) -> None:
        array = (operators.DecoderLayer * len(layers))(*layers)
        self._memory = (layers, array, norm)
        self.count, self._kv_heads = len(layers), heads[1]
        self.window = windows.smallest  # the layers of the Llama family have at most one window size
        addresses = ctypes.addressof(array), norm.data_ptr()
        self._stack = operators.Stack(self.count, norm.shape[0], *heads, inner, eps, scale, *addresses)

    def leaves(self, segments: Sequence[Segment]) -> list[operators.Leaves] | None:
        """Convert the segments to the kernel's input; ``None`` if the kernel cannot run them."""
        if sum(segment.width for segment in segments) > MAX_ROWS:
            return None
        leaves = []
        for segment in segments:
            store, probe = segment.store, segment.source
            other_probe = probe is not None and type(probe) is not SourceProbe
            if segment.masked or other_probe or segment.end > store.capacity or not store.is_addressable():
                return None
            slots = () if probe is None else probe.slots
            ranges = (ctypes.c_long * (2 * len(slots)))(*(end for slot in slots for end in (slot.start, slot.stop)))
            (full, full_from), (windowed, windowed_from) = map(segment.tail_mask, (None, self.window))
            pointers = store.pointers
            assert pointers is not None
            of_segment = operators.Leaves(
                keys=ctypes.addressof(pointers.keys),
                values=ctypes.addressof(pointers.values),
                kv_head=pointers.kv_head,
                start=segment.start,
                count=segment.width,
                mask=(_address(full), _address(windowed)),
                masked_from=(full_from, windowed_from),
                parts=operators.parts(torch.get_num_threads(), self._kv_heads, segment.end),
                ranges=ctypes.addressof(ranges),
                range_count=len(slots),
            )
            of_segment.memory = pointers, full, windowed, ranges
            leaves.append(of_segment)
        return leaves

    @operators.untraced
    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, leaves: Sequence[operators.Leaves], capture: CaptureSpec | None
    ) -> tuple[Tensor, Tensor | None, list[Tensor], Tensor | None]:
        """Run the layers over ``[T, d]``, whose memory is overwritten, and write the tokens' keys and values.

        All tensors are contiguous float32. The result is that of :meth:`.lean.Lean.decode`; and the attention on the
        source and the passages, ``[T, 1 + P]``, or ``None`` if it was not requested.
        """
        after_norm, columns = self.count + 1, max(leaf.range_count for leaf in leaves)
        requested, early, heads = list[int](), list[int](), tuple[tuple[int, int], ...]()
        if capture is not None:
            final = self.count if capture.final == "pre_norm" else after_norm
            middle = [final if layer == self.count else layer for layer in range(capture.first, capture.last + 1)]
            requested, early = [*middle, final], sorted(set(capture.early))
            heads = capture.source_heads if columns else ()
        layers = (*requested, *early, after_norm)
        states = x.new_empty(len(layers), *x.shape)
        taps = zip(layers, (state.data_ptr() for state in states), strict=True)
        masses = x.new_zeros(len(heads), columns, x.shape[0])
        operators.handle().cocoa_layers(
            *(ctypes.byref(self._stack), (operators.Leaves * len(leaves))(*leaves), len(leaves)),
            *(x.data_ptr(), cos.data_ptr(), sin.data_ptr()),
            *((operators.Tap * len(layers))(*(operators.Tap(*tap) for tap in taps)), len(layers)),
            *((operators.Head * len(heads))(*(operators.Head(*head) for head in heads)), len(heads)),
            *(masses.data_ptr(), columns, torch.get_num_threads()),
        )
        wanted = states[: len(requested)] if requested else None
        return states[-1], wanted, [*states[len(requested) : -1]], masses.mean(dim=0).T if heads else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
