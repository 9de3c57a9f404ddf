"""The keys and values of one sequence, in slots that are allotted once.

A forward pass writes its tokens into free slots and attends over the used part through a view: nothing is concatenated
and no prefix is copied. When a branch is kept, its few slots are moved down to follow the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.execution.native.layers import Places


class KeyValues:
    """Keys and values of every layer, each ``[heads, capacity, head_dim]``, on the layer's own device.

    Args:
        num_layers: of the model.
        capacity: slots; :meth:`reserve` adds more.

    Attributes:
        blocks: of each layer, the memory that its keys and values are views of, ``[..., capacity, head_dim]``.
        places: where that is, once our own kernels have asked.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.blocks: list[tuple[Tensor, ...]] = [()] * num_layers
        self.places: Places | None = None

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[heads, n, head_dim]`` into the slots from ``start`` on."""
        if self.keys[layer] is None:
            self._allot(layer, keys, values)
        end = start + keys.shape[1]
        self.keys[layer][:, start:end] = keys  # type: ignore[index]
        self.values[layer][:, start:end] = values  # type: ignore[index]

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views ``[heads, end, head_dim]`` of the first slots."""
        return self.keys[layer][:, :end], self.values[layer][:, :end]  # type: ignore[index]

    def compact(self, slots: Sequence[int], start: int) -> None:
        """Move slots down to ``start``, in order. They lie at or after their new places."""
        end = start + len(slots)
        if list(slots) == list(range(start, end)):
            return
        if self.places is not None:
            self.places.move(slots, start)
            return
        index = torch.tensor(slots)
        for blocks in self.blocks:
            for block in blocks:
                if index.device != block.device:
                    index = index.pin_memory() if block.device.type == "cuda" and index.device.type == "cpu" else index
                    index = index.to(block.device, non_blocking=True)
                block[..., start:end, :] = block.index_select(-2, index)

    def reserve(self, capacity: int) -> None:
        """Make room for that many slots, one layer after the other."""
        if capacity <= self.capacity:
            return
        known, self.capacity = self.capacity, capacity
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys is not None and values is not None:
                self._allot(layer, keys, values)
                self.write(layer, 0, keys[:, :known], values[:, :known])

    def prefix(self, length: int, capacity: int) -> KeyValues:
        """A copy of the first ``length`` slots, with room for ``capacity``."""
        copy = KeyValues(len(self.keys), capacity)
        copy.fill(self, length)
        return copy

    def fill(self, source: KeyValues, length: int, start: int = 0) -> None:
        """Copy the slots from ``start`` up to ``length`` of another store."""
        for layer, (keys, values) in enumerate(zip(source.keys, source.values, strict=True)):
            if keys is not None and values is not None:
                self.write(layer, start, keys[:, start:length], values[:, start:length])

    @property
    def nbytes(self) -> int:
        """Memory allotted."""
        return sum(block.numel() * block.element_size() for blocks in self.blocks for block in blocks)

    def _allot(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Memory for a layer, in one piece if its keys and values are alike: it is then compacted in one go.

        Zeros, not empty: a masked slot still enters the attention as 0 * value, and 0 * NaN is NaN.
        """
        self.places = None
        if keys.shape == values.shape:
            block = keys.new_zeros(2, keys.shape[0], self.capacity, keys.shape[2])
            self.keys[layer], self.values[layer] = block.unbind()
            self.blocks[layer] = (block,)
        else:
            own = [like.new_zeros(like.shape[0], self.capacity, like.shape[2]) for like in (keys, values)]
            self.keys[layer], self.values[layer] = own
            self.blocks[layer] = tuple(own)
