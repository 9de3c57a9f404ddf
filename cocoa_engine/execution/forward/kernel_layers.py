"""Runs the layers of the lean pass in one native kernel call, for steps that the kernel supports."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cocoa_engine.execution.forward.base import Segment
from cocoa_engine.execution.native.layers import MAX_ROWS, KeyValuePointers, Layers, Leaves, Mask, is_addressable
from cocoa_engine.model.configs import Windows
from cocoa_engine.model.hidden_states import CaptureSpec


class KernelLayers:
    """All layers and the norm after them, over the leaves of some sequences.

    Args:
        native: runs the layers.
        windows: the layers' sliding windows.
    """

    def __init__(self, native: Layers, windows: Windows) -> None:
        self.native = native
        self.window = windows.smallest  # the layers of the Llama family have at most one window size

    def leaves(self, segments: Sequence[Segment]) -> list[Leaves] | None:
        """Convert the segments to the kernel's input; ``None`` if the kernel cannot run them."""
        if sum(segment.width for segment in segments) > MAX_ROWS:
            return None
        found = [leaves for segment in segments if (leaves := _leaves(segment, self.window)) is not None]
        return found if len(found) == len(segments) else None

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, leaves: Sequence[Leaves], capture: CaptureSpec | None
    ) -> tuple[Tensor, Tensor | None, list[Tensor], Tensor | None, Tensor | None]:
        """Run the layers.

        Args:
            x: ``[T, d]``. Its memory is overwritten.
            cos, sin: ``[T, head_dim]``.
            leaves: from :meth:`leaves`.
            capture: the states to return.

        Returns:
            The states after the norm, ``[T, d]``; the requested states, ``[N + 1, T, d]``, or ``None``; the states of
            each early layer, ``[T, d]``; the source attention, ``[T]``, or ``None`` if it was not requested; and that
            of the passages, ``[T, P]``, or ``None`` if there are none.
        """
        count = self.native.count
        after_norm = count + 1
        kept, early = [], []
        if capture is not None:
            final = count if capture.final == "pre_norm" else after_norm
            middle = [final if layer == count else layer for layer in range(capture.first, capture.last + 1)]
            kept, early = [*middle, final], sorted(set(capture.early))
        layers = (*kept, *early, after_norm)
        states = x.new_empty(len(layers), *x.shape)
        size = x.numel() * x.element_size()
        taps = [(layer, states.data_ptr() + number * size) for number, layer in enumerate(layers)]
        heads = capture.source_heads if capture is not None and any(each.source is not None for each in leaves) else ()
        masses = self.native(x, cos, sin, leaves, taps, heads)
        source = masses[:, 0].mean(dim=0) if heads else None
        passages = masses[:, 1:].mean(dim=0).T if heads and masses.shape[1] > 1 else None
        return states[-1], states[: len(kept)] if kept else None, list(states[len(kept) : -1]), source, passages


def _leaves(segment: Segment, window: int | None) -> Leaves | None:
    store = segment.store
    if segment.masked or segment.probe is not None or segment.end > store.capacity:
        return None
    if store.pointers is None:
        if not is_addressable(store.keys, store.values):
            return None
        store.pointers = KeyValuePointers(store.keys, store.values)  # type: ignore[arg-type]
    return Leaves(
        pointers=store.pointers,
        start=segment.start,
        tokens=segment.width,
        full_mask=Mask(*segment.tail_mask(None)),
        window_mask=Mask(*segment.tail_mask(window)),
        source=None if segment.source is None else segment.source.source,
        passages=() if segment.source is None else segment.source.passages,
    )
