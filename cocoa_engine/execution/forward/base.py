"""The interface of forward passes over the tokens of several sequences, packed without padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cocoa_engine.execution.forward.kv_store import KeyValues
from cocoa_engine.execution.forward.source_attention import SourceProbe
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel

COST_OF_A_ROW = 0.08
"""The cost of a further token in a pass of few tokens, as a share of the cost of the first one, if it is not known.

Measured on CPUs: 0.02 where memory is slow, 0.16 where the weights come from a cache."""


class Segment:
    """The tokens of one sequence in a pass, and the slots that each token sees.

    Args:
        store: the sequence's keys and values. The tokens are written to the slots from ``start`` on.
        start: the first new slot.
        token_ids, positions: one entry per token.
        committed: number of committed slots. They come first, and every token sees them.
        own_slots: for each token, the slots it sees beyond the committed ones, its own slot included. ``None``: the
            tokens are a chain, in which each token sees all slots up to its own.
        tail_positions: positions of the slots from ``committed`` on, for sliding windows.
        masked: by layer, the masked heads, which attend uniformly.
        chains: replaces ``own_slots`` for several consecutive chains. Each entry holds the ranges of uncommitted slots
            that the chain sees, and the number of its tokens.
    """

    def __init__(
        self,
        store: KeyValues,
        start: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        committed: int,
        *,
        own_slots: Sequence[Sequence[int]] | None = None,
        tail_positions: Sequence[int] = (),
        masked: Mapping[int, Sequence[int]] | None = None,
        chains: Sequence[tuple[Sequence[range], int]] | None = None,
    ) -> None:
        self.store = store
        self.start = start
        self.token_ids = token_ids
        self.positions = positions
        self.committed = committed
        self.own_slots = own_slots
        self.chains = chains
        self.tail_positions = tail_positions
        self.masked = masked or {}
        self.source: SourceProbe | None = None
        self.width = len(token_ids)
        self.end = start + self.width
        self._masks: dict[tuple[int | None, int, int, torch.dtype, torch.device], Tensor | None] = {}
        self._tail: Tensor | None = None

    def is_prompt(self, window: int | None) -> bool:
        """Whether plain causal attention over the segment's own tokens is sufficient."""
        return (
            self.own_slots is None
            and self.chains is None
            and self.start == 0
            and (window is None or self.end <= window)
        )

    def mask(
        self, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device, end: int | None = None
    ) -> Tensor | None:
        """Additive mask ``[repeats * width, end]``: 0 for visible slots, the dtype's lowest finite number for others.

        ``None`` if every token sees all slots. The mask has no -inf, because the softmax of a row of -inf is NaN.

        Args:
            window: size of the layer's sliding window, if it has one.
            repeats: number of times the rows are repeated, for query heads folded into the query's length.
            end: number of slots in the mask if larger than the segment's end. No token sees the additional slots.
        """
        key = (window if window is not None and self.end > window else None, repeats, end or self.end, dtype, device)
        if key not in self._masks:
            mask = self._mask(key[0], dtype, key[2] - self.end)
            if mask is not None and repeats > 1:
                mask = mask.repeat(repeats, 1)
            self._masks[key] = None if mask is None else mask.to(device, non_blocking=True)
        return self._masks[key]

    def tail_mask(self, window: int | None) -> tuple[Tensor | None, int]:
        """A mask ``[width, end - first]``, float32 on the CPU, for the slots from ``first`` on; and ``first``.

        Every token sees the slots below ``first``. The mask is ``None`` if every token sees all slots.
        """
        cpu = torch.device("cpu")
        if window is not None and self.end > window:
            return self.mask(window, 1, torch.float32, cpu), 0
        if self._tail is None and self.own_slots is not None:
            self._tail = self._leaf_mask(self.own_slots, torch.float32).to(cpu)
        elif self._tail is None and (mask := self.mask(None, 1, torch.float32, cpu)) is not None:
            self._tail = mask[:, self.committed :].contiguous()
        return self._tail, self.committed

    def _mask(self, window: int | None, dtype: torch.dtype, beyond: int) -> Tensor | None:
        lowest = torch.finfo(dtype).min
        if self.chains is not None:
            mask = self._chain_mask(self.chains, lowest, dtype)
        elif self.own_slots is None:
            if self.width == 1 and window is None and not beyond:
                return None
            mask = torch.full((self.width, self.end), lowest, dtype=dtype).triu_(self.start + 1)
        else:
            mask = F.pad(self._leaf_mask(self.own_slots, dtype), (self.committed, 0))
        if window is not None:
            slot_positions = torch.arange(self.end)
            if self.own_slots is not None or self.chains is not None:
                slot_positions[self.committed :] = torch.tensor(self.tail_positions[: self.end - self.committed])
            distance = torch.tensor(self.positions)[:, None] - slot_positions  # [width, end]
            mask.masked_fill_(distance >= window, lowest)
        return F.pad(mask, (0, beyond), value=lowest) if beyond else mask

    def _leaf_mask(self, own_slots: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        """The mask ``[width, end - committed]`` of the uncommitted slots."""
        lowest = torch.finfo(dtype).min
        rows = [[lowest] * (self.end - self.committed) for _ in own_slots]
        for row, slots in zip(rows, own_slots, strict=True):
            for slot in slots:
                row[slot - self.committed] = 0.0
        return torch.tensor(rows, dtype=dtype)

    def _chain_mask(self, chains: Sequence[tuple[Sequence[range], int]], lowest: float, dtype: torch.dtype) -> Tensor:
        mask = torch.zeros(self.width, self.end, dtype=dtype)
        mask[:, self.committed :] = lowest
        row = 0
        for seen, length in chains:
            rows, own = slice(row, row + length), slice(self.start + row, self.start + row + length)
            for slots in seen:
                mask[rows, slots.start : slots.stop] = 0
            mask[rows, own] = torch.full((length, length), lowest, dtype=dtype).triu_(1)
            row += length
        return mask


class PassOutput(NamedTuple):
    """The output of a forward pass.

    Attributes:
        logits: ``[T, V]``, logits of the next token; of a prompt, ``[1, V]`` after its last token.
        hidden: ``[N + 1, T, d]`` float32, the states of the middle layers and then of the final layer; ``None`` if no
            states were requested.
        early: ``[E, T, V]`` float32, logits of the early layers; ``None`` if none were requested.
        masses: ``[T, 1 + P]`` float32, each token's mean attention mass on the source and on each passage of its
            sequence, padded with zeros to the largest number of passages; ``None`` if it was not measured.
    """

    logits: Tensor
    hidden: Tensor | None
    early: Tensor | None = None
    masses: Tensor | None = None


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
    """The cost of a further token in a pass of few tokens, as a share of the cost of the first one."""

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
    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> PassOutput:
        """Run the tokens of all segments, in order.

        Args:
            capture: the hidden states to return. ``None`` (for a prompt, one segment) returns no hidden states, and
                logits of the last token only.
        """
