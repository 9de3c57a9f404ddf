"""The keys and values of one sequence, in preallocated slots.

A forward pass writes its tokens to free slots and attends over the used slots through a view: nothing is concatenated
and no prefix is copied. When a branch is committed, its few slots are moved next to the prefix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.execution.native import operators


class KeyValuePointers:
    """The addresses of one sequence's keys and values in every layer.

    Args:
        keys, values: by layer, each ``[kv_heads, S, head_dim]`` float32 on the CPU, in the same layout.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        array = ctypes.c_void_p * len(keys)
        self.keys = array(*(each.data_ptr() for each in keys))
        self.values = array(*(each.data_ptr() for each in values))
        self.kv_head = keys[0].stride(0)
        self._kv_heads, _, self._head_dim = keys[0].shape

    def move(self, slots: Sequence[int], start: int) -> None:
        """Move slots to the slots from ``start`` on, in order. No slot may be below its target."""
        addresses, count = (self.keys, self.values, len(self.keys)), len(slots)
        shape = (self._kv_heads, self.kv_head, self._head_dim)
        operators.handle().cocoa_move(*addresses, *shape, (ctypes.c_long * count)(*slots), count, start)


class KeyValues:
    """Keys and values of every layer, each ``[heads, capacity, head_dim]``, on the layer's own device.

    Args:
        num_layers: number of layers of the model.
        capacity: number of slots. :meth:`reserve` adds more.

    Attributes:
        blocks: by layer, the memory that keys and values are views of, each ``[..., capacity, head_dim]``.
        pointers: the addresses for the native kernels, set at their first use.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.blocks: list[tuple[Tensor, ...]] = [()] * num_layers
        self.pointers: KeyValuePointers | None = None

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[heads, n, head_dim]`` into the slots from ``start`` on."""
        if self.keys[layer] is None:
            self._allocate(layer, keys, values)
        end = start + keys.shape[1]
        self.keys[layer][:, start:end] = keys  # type: ignore[index]
        self.values[layer][:, start:end] = values  # type: ignore[index]

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views ``[heads, end, head_dim]`` of the keys and values in the first ``end`` slots."""
        return self.keys[layer][:, :end], self.values[layer][:, :end]  # type: ignore[index]

    def is_addressable(self) -> bool:
        """Whether the native kernels can read the store; :attr:`pointers` are then set."""
        if self.pointers is None:
            keys, values = ([part for part in parts if part is not None] for parts in (self.keys, self.values))
            layouts = {(part.stride(), part.shape[0], part.dtype, part.device.type) for part in (*keys, *values)}
            if len(keys) < len(self.keys) or len(layouts) != 1:
                return False
            if not operators.is_readable(keys[0]) or keys[0].stride(1) != keys[0].shape[2]:
                return False
            self.pointers = KeyValuePointers(keys, values)
        return True

    def compact(self, slots: Sequence[int], start: int) -> None:
        """Move slots to the slots from ``start`` on, in order. No slot may be below its target."""
        end = start + len(slots)
        if list(slots) == list(range(start, end)):
            return
        if self.pointers is not None:
            self.pointers.move(slots, start)
            return
        index = torch.tensor(slots)
        for blocks in self.blocks:
            for block in blocks:
                if index.device != block.device:
                    index = index.pin_memory() if block.device.type == "cuda" and index.device.type == "cpu" else index
                    index = index.to(block.device, non_blocking=True)
                block[..., start:end, :] = block.index_select(-2, index)

    def reserve(self, capacity: int) -> None:
        """Grow to ``capacity`` slots, one layer at a time."""
        if capacity <= self.capacity:
            return
        known, self.capacity = self.capacity, capacity
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys is not None and values is not None:
                self._allocate(layer, keys, values)
                self.write(layer, 0, keys[:, :known], values[:, :known])

    def prefix(self, length: int, capacity: int) -> KeyValues:
        """A copy of the first ``length`` slots, with ``capacity`` slots in total."""
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
        """Allocated memory in bytes."""
        return sum(block.numel() * block.element_size() for blocks in self.blocks for block in blocks)

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Allocate a layer's memory: one block if keys and values have the same shape, so that one copy compacts both.

        The memory is zeroed, because a masked slot still enters the attention as 0 * value, and 0 * NaN is NaN.
        """
        self.pointers = None
        if keys.shape == values.shape:
            block = keys.new_zeros(2, keys.shape[0], self.capacity, keys.shape[2])
            self.keys[layer], self.values[layer] = block.unbind()
            self.blocks[layer] = (block,)
        else:
            own = [like.new_zeros(like.shape[0], self.capacity, like.shape[2]) for like in (keys, values)]
            self.keys[layer], self.values[layer] = own
            self.blocks[layer] = tuple(own)
