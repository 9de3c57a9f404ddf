"""Preallocated keys and values in which the branches of a sequence share its prefix.

Every layer holds ``[rows, heads, slots, head_dim]``. A forward pass writes its tokens into the slots it is told and
attends over the used part through a view: nothing is concatenated, and no prefix is ever copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class WritePlan:
    """Where the next forward pass writes, and how far it reads; shared by all layers.

    Attributes:
        rows: the rows of the cache that take part.
        start: the first slot written, if the slots are the same contiguous run in the one row that takes part.
        slots: ``[B, W]``, the slot of each token, if they are not.
        end: the number of slots attended over.
    """

    def __init__(self) -> None:
        self.contiguous(0, 0, 0)

    def contiguous(self, row: int, start: int, width: int) -> None:
        self.rows = slice(row, row + 1)
        self.start = start
        self.slots: Tensor | None = None
        self.end = start + width

    def scattered(self, slots: Tensor, start: int, end: int) -> None:
        self.rows = slice(0, slots.shape[0])
        self.start = start
        self.slots = slots
        self.end = end


class SlotLayer(CacheLayerMixin):
    """One layer of :class:`SlotCache`, on the layer's own device."""

    is_sliding = False  # sliding windows are a matter of the mask here: every slot is kept

    def __init__(self, plan: WritePlan, rows: int, capacity: int) -> None:
        super().__init__()
        self.plan = plan
        self.rows = rows
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # zeros, not empty: a masked slot still enters the softmax as 0 * value, and 0 * NaN is NaN
        def slots(states: Tensor) -> Tensor:
            return states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])

        self.keys, self.values = slots(key_states), slots(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write ``[B, heads, W, head_dim]`` as planned; returns views ``[B, heads, end, head_dim]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            if plan.slots is None:
                store[plan.rows, :, plan.start : plan.end] = states
            else:
                slots = plan.slots.to(store.device, non_blocking=True)
                rows = torch.arange(slots.shape[0], device=store.device)[:, None]
                store[rows, :, slots] = states.transpose(1, 2)
        return self.keys[plan.rows, :, : plan.end], self.values[plan.rows, :, : plan.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.plan.start

    def get_max_length(self) -> int:
        return self.capacity


class SlotCache(Cache):
    """A transformers cache of :class:`SlotLayer`.

    Args:
        num_layers: of the model.
        rows: sequences held.
        capacity: slots of each.
    """

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        self.plan = WritePlan()
        super().__init__(layers=[SlotLayer(self.plan, rows, capacity) for _ in range(num_layers)])

    def _stores(self) -> list[Tensor]:
        return [store for layer in self.layers if layer.is_initialized for store in (layer.keys, layer.values)]

    def compact(self, row: int, slots: list[int], start: int) -> None:
        """Move a kept branch's slots down to ``start``, in order. They lie at or after their new places."""
        if slots == list(range(start, start + len(slots))):
            return
        for store in self._stores():
            store[row, :, start : start + len(slots)] = store[row][:, slots]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of one row over another's."""
        for store in self._stores():
            store[target, :, :length] = store[source, :, :length]
