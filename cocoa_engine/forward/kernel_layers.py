"""The lean pass's layers by our own kernels, in one call, where a step is such as they are for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.forward.base import Segment
from cocoa_engine.forward.windows import Windows
from cocoa_engine.hidden_states import Wanted
from cocoa_engine.native.layers import MOST_ROWS, DecoderLayer, Layers, Places, Tips, reachable


class KernelLayers:
    """All layers over the tips of some sequences.

    Args:
        layers: the model's, to be run by ``native``.
        windows: of its layers.
    """

    def __init__(self, layers: Sequence[DecoderLayer], native: Layers, windows: Windows) -> None:
        self.count = len(layers)
        self.native = native
        self.window = windows.smallest  # the only one there is

    def tips(self, segments: Sequence[Segment]) -> list[Tips] | None:
        """The segments' tokens; none unless they are few, may look with every head, and have their slots."""
        if sum(segment.width for segment in segments) > MOST_ROWS:
            return None
        found = [_tips(segment, self.window) for segment in segments]
        return None if None in found else found  # type: ignore[return-value]

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, tips: Sequence[Tips], wanted: Wanted
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run them.

        Args:
            x: ``[T, d]``, changed to what the layers make of it.
            cos, sin: ``[T, head_dim]``.

        Returns:
            The states before the middle layers, and those before the early ones, each ``[T, d]``.
        """
        middle = range(wanted.first, min(wanted.last, self.count - 1) + 1)
        numbers = (*middle, *sorted(set(wanted.early)))
        states = x.new_empty(len(numbers), *x.shape)
        size = states.stride(0) * states.element_size()
        taps = [(number, states.data_ptr() + place * size) for place, number in enumerate(numbers)]
        self.native(x, cos, sin, tips, taps)
        found = list(states.unbind())
        return found[: len(middle)], found[len(middle) :]


def _tips(segment: Segment, window: int | None) -> Tips | None:
    store = segment.store
    if segment.masked or segment.probe is not None:
        return None
    if store.places is None:
        if not reachable(store.keys, store.values):
            return None
        store.places = Places(store.keys, store.values)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    plain = segment.mask(None, 1, torch.float32, cpu)
    if window is None or segment.end <= window:
        return Tips(store.places, segment.start, segment.width, (plain, plain), (segment.committed, segment.committed))
    masks = plain, segment.mask(window, 1, torch.float32, cpu)
    return Tips(store.places, segment.start, segment.width, masks, (segment.committed, 0))
