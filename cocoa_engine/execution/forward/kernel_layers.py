"""The lean pass's layers by our own kernels, in one call, where a step is such as they are for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.forward.windows import Windows
from cocoa_engine.execution.native.layers import MOST_ROWS, Layers, Places, Tips, reachable
from cocoa_engine.model.hidden_states import CaptureSpec


class KernelLayers:
    """All layers over the tips of some sequences, and the norm after them.

    Args:
        native: runs them.
        windows: of the layers.
    """

    def __init__(self, native: Layers, windows: Windows) -> None:
        self.native = native
        self.window = windows.smallest  # the only one there is

    def tips(self, segments: Sequence[Segment]) -> list[Tips] | None:
        """The segments' tokens; none unless they are few, may look with every head, and have their slots."""
        if sum(segment.width for segment in segments) > MOST_ROWS:
            return None
        found = [_tips(segment, self.window) for segment in segments]
        return None if None in found else found  # type: ignore[return-value]

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, tips: Sequence[Tips], wanted: CaptureSpec | None
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Run them.

        Args:
            x: ``[T, d]``, used up.
            cos, sin: ``[T, head_dim]``.

        Returns:
            ``[T, d]``, the states after the norm; ``[N + 1, T, d]``, the wanted ones, if any; and the early layers',
            each ``[T, d]``.
        """
        count = self.native.count
        after_norm = count + 1
        kept, early = [], []
        if wanted is not None:
            final = count if wanted.final == "pre_norm" else after_norm
            middle = [final if layer == count else layer for layer in range(wanted.first, wanted.last + 1)]
            kept, early = [*middle, final], sorted(set(wanted.early))
        layers = (*kept, *early, after_norm)
        states = x.new_empty(len(layers), *x.shape)
        size = x.numel() * x.element_size()
        taps = [(layer, states.data_ptr() + place * size) for place, layer in enumerate(layers)]
        self.native(x, cos, sin, tips, taps)
        return states[-1], states[: len(kept)] if kept else None, list(states[len(kept) : -1])


def _tips(segment: Segment, window: int | None) -> Tips | None:
    store = segment.store
    if segment.masked or segment.probe is not None or segment.end > store.capacity:
        return None
    if store.places is None:
        if not reachable(store.keys, store.values):
            return None
        store.places = Places(store.keys, store.values)  # type: ignore[arg-type]
    masks = segment.mask_from(None), segment.mask_from(window)
    return Tips(store.places, segment.start, segment.width, masks)
