"""The interface of forward passes over the tokens of several sequences, packed without padding.

The keys and values of a sequence have preallocated slots. A pass writes its tokens to free slots and attends over the
used slots through a view: nothing is concatenated and no prefix is copied. When a branch is committed, its few slots
are moved next to the prefix.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cocoa_engine.execution.forward.source_attention import SourceProbe
from cocoa_engine.execution.native import operators
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel

COST_OF_A_ROW = 0.08
"""The cost of a further token in a pass of few tokens, as a share of the cost of the first one, if it is not known.

Measured on CPUs: 0.02 where memory is slow, 0.16 where the weights come from a cache."""


class KeyValuePointers:
    """The addresses of one sequence's keys and values in every layer, float32 on the CPU and in the same layout."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        array = ctypes.c_void_p * len(keys)
        self.keys = array(*(store.data_ptr() for store in keys))
        self.values = array(*(store.data_ptr() for store in values))
        self.kv_head = keys[0].stride(0)
        self._kv_heads, _, self._head_dim = keys[0].shape

    def move(self, slots: Sequence[int], start: int) -> None:
        """As :meth:`KeyValues.compact`."""
        addresses, count = (self.keys, self.values, len(self.keys)), len(slots)
        shape = (self._kv_heads, self.kv_head, self._head_dim)
        operators.handle().cocoa_move(*addresses, *shape, (ctypes.c_long * count)(*slots), count, start)


class KeyValues:
    """Keys and values of every layer, each ``[heads, capacity, head_dim]``, on the layer's own device.

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
        index = torch.tensor(slots, device="cpu")
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
        old_capacity, self.capacity = self.capacity, capacity
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys is not None and values is not None:
                self._allocate(layer, keys, values)
                self.write(layer, 0, keys[:, :old_capacity], values[:, :old_capacity])

    def prefix(self, length: int) -> KeyValues:
        """A copy of the first ``length`` slots."""
        copy = KeyValues(len(self.keys), length)
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
        blocks: tuple[Tensor, ...]
        if keys.shape == values.shape:
            blocks = (keys.new_zeros(2, keys.shape[0], self.capacity, keys.shape[2]),)
            self.keys[layer], self.values[layer] = blocks[0].unbind()
        else:
            blocks = tuple(like.new_zeros(like.shape[0], self.capacity, like.shape[2]) for like in (keys, values))
            self.keys[layer], self.values[layer] = blocks
        self.blocks[layer] = blocks


class Segment:
    """The tokens of one sequence in a pass, and the slots that each token sees.

    Args:
        store: the sequence's keys and values. The tokens are written to the slots from ``start`` on.
        start: the first new slot.
        token_ids, positions: one entry per token.
        committed: number of committed slots. They come first, and every token sees them.
        chains: consecutive chains of tokens; each token sees its chain up to itself. An entry holds the uncommitted
            slots that the whole chain sees as well, and the number of its tokens. Default: all tokens are one chain.
        tail_positions: positions of the slots from ``committed`` on, for sliding windows. Default: those of a chain.
        masked: by layer, the masked heads, which attend uniformly.
    """

    def __init__(
        self,
        store: KeyValues,
        start: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        committed: int,
        *,
        chains: Sequence[tuple[Sequence[int], int]] | None = None,
        tail_positions: Sequence[int] = (),
        masked: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.store = store
        self.start = start
        self.token_ids = token_ids
        self.positions = positions
        self.committed = committed
        self.width = len(token_ids)
        self.end = start + self.width
        self.is_chain = chains is None
        self.chains = chains or [((), self.width)]
        self.tail_positions = tail_positions
        self.masked = masked or {}
        self.source: SourceProbe | None = None
        self._masks: dict[tuple[int | None, int, torch.dtype, torch.device], Tensor | None] = {}

    def is_prompt(self, window: int | None) -> bool:
        """Whether plain causal attention over the segment's own tokens is sufficient."""
        return self.is_chain and self.start == 0 and (window is None or self.end <= window)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Additive mask ``[repeats * width, end]``: 0 for visible slots, the dtype's lowest finite number for others.

        ``None`` if every token sees all slots. The mask has no -inf, because the softmax of a row of -inf is NaN. Rows
        repeat for query heads that are folded into the query's length.
        """
        window = window if window is not None and self.end > window else None
        key = (window, repeats, dtype, device)
        if key not in self._masks:
            hidden = self._hidden_tail
            if hidden is None and window is None:
                self._masks[key] = None
                return None
            lowest, mask = torch.finfo(dtype).min, torch.zeros(self.width, self.end, dtype=dtype)
            if hidden is not None:
                mask[:, self.committed :].masked_fill_(hidden < 0, lowest)
            if window is not None:
                slot_positions = torch.arange(self.end)
                if self.tail_positions:
                    slot_positions[self.committed :] = torch.tensor(self.tail_positions[: self.end - self.committed])
                distance = torch.tensor(self.positions)[:, None] - slot_positions  # [width, end]
                mask.masked_fill_(distance >= window, lowest)
            self._masks[key] = (mask.repeat(repeats, 1) if repeats > 1 else mask).to(device, non_blocking=True)
        return self._masks[key]

    def tail_mask(self, window: int | None) -> tuple[Tensor | None, int]:
        """A mask ``[width, end - first]``, float32 on the CPU, for the slots from ``first`` on; and ``first``.

        Every token sees the slots below ``first``. The mask is ``None`` if every token sees all slots.
        """
        if window is not None and self.end > window:
            return self.mask(window, 1, torch.float32, torch.device("cpu")), 0
        hidden = self._hidden_tail
        return None if hidden is None else hidden.cpu(), self.committed

    @cached_property
    def _hidden_tail(self) -> Tensor | None:
        """The mask ``[width, end - committed]`` of the uncommitted slots, float32, without windows."""
        if self.is_chain and self.width == 1:
            return None
        lowest, tail = torch.finfo(torch.float32).min, self.end - self.committed
        first = self.start - self.committed
        if len(self.chains) == self.width:  # leaves; lists are the fastest way for few of them
            rows = [[lowest] * tail for _ in self.chains]
            for number, (row, (slots, _)) in enumerate(zip(rows, self.chains, strict=True)):
                row[first + number] = 0.0
                for slot in slots:
                    row[slot - self.committed] = 0.0
            return torch.tensor(rows, dtype=torch.float32)
        mask, start = torch.full((self.width, tail), lowest, dtype=torch.float32), 0
        for slots, length in self.chains:
            chain = mask[start : start + length]
            chain[:, [slot - self.committed for slot in slots]] = 0
            own = slice(first + start, first + start + length)
            chain[:, own] = chain[:, own].triu(1)
            start += length
        return mask


class StepOutput(NamedTuple):
    """The output of one forward pass for W fed tokens.

    Attributes:
        logits: ``[W, V]``, logits of the next token.
        hidden: ``[N + 1, W, d]`` float32, states of the middle layers m..n and then of the final layer.
        others: ``[K, W, V]`` float32, logits of the early layers or of the model with masked heads. ``None`` if none
            were requested.
        masses: ``[W, 1 + P]`` float32, the mean attention mass of the capture's ``source_heads`` on the prompt, its
            first token left out, and on each of the tree's ``passages``. ``None`` if it was not requested, or if the
            backend does not see the model's attention.
    """

    logits: Tensor
    hidden: Tensor
    others: Tensor | None = None
    masses: Tensor | None = None

    @property
    def source(self) -> Sequence[float | None]:
        """The mass of each token on the prompt; `None` for each if it was not measured."""
        return [None] * len(self.logits) if self.masses is None else self.masses[:, 0].tolist()

    @property
    def passages(self) -> Sequence[Sequence[float]]:
        """The mass of each token on each passage; empty for each if there are none."""
        return [()] * len(self.logits) if self.masses is None else self.masses[:, 1:].tolist()

    def rows(self, start: int, end: int) -> StepOutput:
        """The output of some of the tokens."""
        others = None if self.others is None else self.others[:, start:end]
        masses = None if self.masses is None else self.masses[start:end]
        return StepOutput(self.logits[start:end], self.hidden[:, start:end], others, masses)


class Forward(ABC):
    """Runs packed tokens through a model. Call it inside :meth:`exclusive`."""

    name: str
    masks_heads: ClassVar[bool] = True
    runs_modules: ClassVar[bool] = True
    """Whether the pass runs the model's modules, which may behave differently in training mode."""
    pools_stores: ClassVar[bool] = False
    """Whether a released store is reused for another sequence."""
    whole_prompts = False
    """Whether a prompt must be fed in one pass, because its length changes the states of all tokens."""
    max_sequences: int | None = None
    """Maximum number of sequences in one pass; ``None`` for no limit."""
    native = False
    """Whether the native kernels are used."""
    cost_of_a_row = COST_OF_A_ROW

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def exclusive(self) -> AbstractContextManager[None]:
        """A context that locks the model for one pass; see :meth:`LanguageModel.exclusive`."""
        return self.model.exclusive(runs_modules=self.runs_modules)

    def new_store(self, capacity: int) -> KeyValues:
        """Allocate slots for one sequence."""
        return KeyValues(self.model.num_layers, capacity)

    def release(self, store: KeyValues) -> None:  # noqa: B027 - optional to override
        """Free a store from :meth:`new_store`. The caller must not use it afterwards."""

    @abstractmethod
    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> StepOutput:
        """Run the tokens of all segments, in order.

        Without ``capture`` (for a prompt, one segment), no hidden states are returned, and logits of the last token
        only, ``[1, V]``. The ``masses`` have a column for each passage of the segment with the most.
        """
