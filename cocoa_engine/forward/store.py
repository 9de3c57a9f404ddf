"""The keys and values of one sequence, in slots that are allotted once.

A forward pass writes its tokens into free slots and attends over the used part through a view: nothing is concatenated
and no prefix is copied. When a branch is kept, its few slots are moved down to follow the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class KeyValues:
    """Keys and values of every layer, each ``[heads, capacity, head_dim]``, on the layer's own device.

    Args:
        num_layers: of the model.
        capacity: slots; :meth:`reserve` adds more.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[heads, n, head_dim]`` into the slots from ``start`` on."""
        if (own := self.keys[layer]) is None:
            self.keys[layer] = own = self._slots(keys)
            self.values[layer] = self._slots(values)
        end = start + keys.shape[1]
        own[:, start:end] = keys
        self.values[layer][:, start:end] = values  # type: ignore[index]

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views ``[heads, end, head_dim]`` of the first slots."""
        return self.keys[layer][:, :end], self.values[layer][:, :end]  # type: ignore[index]

    def compact(self, slots: Sequence[int], start: int) -> None:
        """Move slots down to ``start``, in order. They lie at or after their new places."""
        if list(slots) == list(range(start, start + len(slots))):
            return
        for store in self._stores():
            store[:, start : start + len(slots)] = store[:, list(slots)]

    def reserve(self, capacity: int) -> None:
        """Make room for that many slots, one layer after the other."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                if store is not None:
                    stores[layer] = larger = self._slots(store)
                    larger[:, : store.shape[1]] = store

    def prefix(self, length: int, capacity: int) -> KeyValues:
        """A copy of the first ``length`` slots, with room for ``capacity``."""
        copy = KeyValues(len(self.keys), capacity)
        copy.fill(self, length)
        return copy

    def fill(self, source: KeyValues, length: int) -> None:
        """Copy the first ``length`` slots of another store."""
        for layer, (keys, values) in enumerate(zip(source.keys, source.values, strict=True)):
            if keys is not None and values is not None:
                self.write(layer, 0, keys[:, :length], values[:, :length])

    @property
    def nbytes(self) -> int:
        """Memory allotted."""
        return sum(store.numel() * store.element_size() for store in self._stores())

    def _slots(self, like: Tensor) -> Tensor:
        # zeros, not empty: a masked slot still enters the attention as 0 * value, and 0 * NaN is NaN
        return like.new_zeros(like.shape[0], self.capacity, like.shape[2])

    def _stores(self) -> list[Tensor]:
        return [store for store in (*self.keys, *self.values) if store is not None]
