"""One forward pass over tokens of several sequences, packed one after the other without padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cocoa_engine.execution.forward.kv_store import KeyValues
from cocoa_engine.model.hidden_states import CaptureSpec
from cocoa_engine.model.language_model import LanguageModel

Probe = Callable[[int, Tensor], None]
"""Told, in each layer, which slot each head of a lone token attends to most: ``(layer, [heads])``, on the CPU."""


class Segment:
    """The tokens of one sequence in a pass, and what each may look at.

    Args:
        store: where the sequence's keys and values are; the tokens are written to the slots from ``start`` on.
        start: the first of them.
        token_ids, positions: of the tokens.
        committed: slots that every token sees.
        own_slots: of each token, the slots beyond those that it sees, its own included; none means that the tokens are
            a chain in which each sees all before it.
        tail_positions: positions of the slots from ``committed`` on (for sliding windows).
        masked: by layer, heads that attend uniformly.
        chains: instead of ``own_slots``: the tokens are chains one after the other, each of so many tokens, and all of
            a chain see some runs of slots beyond the committed ones.
    """

    def __init__(
        self,
        store: KeyValues,
        start: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        committed: int,
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
        self.probe: Probe | None = None
        self.width = len(token_ids)
        self.end = start + self.width
        self._masks: dict[tuple[int | None, int, int, torch.dtype, torch.device], Tensor | None] = {}
        self._tail: Tensor | None = None

    def is_prompt(self, window: int | None) -> bool:
        """Whether plain causal attention over the pass's own tokens is all there is to do."""
        return (
            self.own_slots is None
            and self.chains is None
            and self.start == 0
            and (window is None or self.end <= window)
        )

    def mask(
        self, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device, end: int | None = None
    ) -> Tensor | None:
        """Additive mask ``[repeats * width, end]``: 0 where a token may look, the dtype's lowest number elsewhere.

        None if every token may look everywhere. A finite lowest number, for rows of -inf give NaN.

        Args:
            window: of a layer with sliding attention.
            repeats: how often the rows are repeated, for query heads folded into the query's length.
            end: of the slots, if it is beyond the segment's; nobody sees those there.
        """
        key = (window if window is not None and self.end > window else None, repeats, end or self.end, dtype, device)
        if key not in self._masks:
            mask = self._mask(key[0], dtype, key[2] - self.end)
            if mask is not None and repeats > 1:
                mask = mask.repeat(repeats, 1)
            self._masks[key] = None if mask is None else mask.to(device, non_blocking=True)
        return self._masks[key]

    def mask_from(self, window: int | None) -> tuple[Tensor | None, int]:
        """The same on the CPU in float32, of the slots from the first on that not every token sees: the mask and that.

        None again if every token may look everywhere.
        """
        cpu = torch.device("cpu")
        if window is not None and self.end > window:
            return self.mask(window, 1, torch.float32, cpu), 0
        if self._tail is None and self.own_slots is not None:
            self._tail = self._mask_of_tips(self.own_slots, torch.float32).to(cpu)
        elif self._tail is None and (mask := self.mask(None, 1, torch.float32, cpu)) is not None:
            self._tail = mask[:, self.committed :].contiguous()
        return self._tail, self.committed

    def _mask(self, window: int | None, dtype: torch.dtype, beyond: int) -> Tensor | None:
        lowest = torch.finfo(dtype).min
        if self.chains is not None:
            mask = self._mask_of_chains(self.chains, lowest, dtype)
        elif self.own_slots is None:
            if self.width == 1 and window is None and not beyond:
                return None
            mask = torch.full((self.width, self.end), lowest, dtype=dtype).triu_(self.start + 1)
        else:
            mask = F.pad(self._mask_of_tips(self.own_slots, dtype), (self.committed, 0))
        if window is not None:
            slot_positions = torch.arange(self.end)
            if self.own_slots is not None or self.chains is not None:
                slot_positions[self.committed :] = torch.tensor(self.tail_positions[: self.end - self.committed])
            distance = torch.tensor(self.positions)[:, None] - slot_positions  # [width, end]
            mask.masked_fill_(distance >= window, lowest)
        return F.pad(mask, (0, beyond), value=lowest) if beyond else mask

    def _mask_of_tips(self, own_slots: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        """``[width, end - committed]``."""
        lowest = torch.finfo(dtype).min
        rows = [[lowest] * (self.end - self.committed) for _ in own_slots]
        for row, slots in zip(rows, own_slots, strict=True):
            for slot in slots:
                row[slot - self.committed] = 0.0
        return torch.tensor(rows, dtype=dtype)

    def _mask_of_chains(
        self, chains: Sequence[tuple[Sequence[range], int]], lowest: float, dtype: torch.dtype
    ) -> Tensor:
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
    """What a pass says of its tokens."""

    logits: Tensor  # [kept, V], the next token's
    hidden: Tensor | None  # [N + 1, T, d] float32: middle layers m..n, then the final one
    early: Tensor | None = None  # [E, T, V] float32, the early layers' logits


class Forward(ABC):
    """A way to run packed tokens through a model. Call it inside :meth:`exclusive`."""

    name: ClassVar[str]
    masks_heads: ClassVar[bool] = True
    runs_modules: ClassVar[bool] = True
    """Whether it runs modules of the model that behave otherwise in training."""
    pools_stores: ClassVar[bool] = False
    """Whether a released store becomes another sequence's."""
    native = False
    """Whether our own kernels do the work."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def exclusive(self) -> AbstractContextManager[None]:
        """The model's own ``exclusive``, for a pass of this kind."""
        return self.model.exclusive(runs_modules=self.runs_modules)

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt has to be fed in one pass, as its length has a say in what each token becomes."""
        return False

    @property
    def max_sequences(self) -> int | None:
        """How many sequences one pass takes; none is any number."""
        return None

    def idle_rows(self, rows: int) -> int:
        """How many tokens that nobody needs a pass of ``rows`` takes along to be faster."""
        return 0

    def new_store(self, capacity: int) -> KeyValues:
        """Slots for one sequence."""
        return KeyValues(self.model.num_layers, capacity)

    def release(self, store: KeyValues) -> None:  # noqa: B027 - most have nothing to do
        """Take back what :meth:`new_store` gave; nothing reads it any more."""

    @abstractmethod
    def __call__(self, segments: Sequence[Segment], wanted: CaptureSpec | None) -> PassOutput:
        """Run the tokens of all segments, in order.

        Args:
            wanted: the hidden states to return; none returns none, and the logits of each segment's last token only
                (a prompt's).
        """
