"""Decoding steps with fixed shapes and addresses, captured once as CUDA graphs and then replayed.

A step of one sequence is padded to a width bucket and attends over a bucket of slots. All inputs that differ from step
to step (token ids, positions, slots, visible slots) reach the device in one small copy; the mask is computed there.
Prompts, batches, wider steps and stores that had to grow run through :class:`Lean` on the same memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cocoa_engine.errors import safe_logger
from cocoa_engine.execution.forward.attention import attend_folded
from cocoa_engine.execution.forward.base import KeyValues, Segment, StepOutput
from cocoa_engine.execution.forward.lean import Lean, Mixture
from cocoa_engine.execution.forward.linears import LinearBackend
from cocoa_engine.execution.forward.source_attention import SourceProbe, attention_weights
from cocoa_engine.execution.native.build import first_line
from cocoa_engine.interruptions import free_in_child
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE  # torch has no public name for it

WIDTHS = (1, 4, 8, 16, 32)
"""Buckets for the width of a step in tokens. Padding tokens are copies of the first token."""

DEPTHS = (28, 124)
"""Buckets for the number of slots that a token sees beyond the committed ones, its own slot included."""

GRAIN = 256
"""The capacity of a store is a multiple of this number of slots. A step attends over 1, 2, 4, ... times this number, at
most the capacity."""

MAX_IDLE_STORES = 4
"""Number of free stores that are kept, with their graphs, for later sequences."""

MAX_IDLE_BYTES = 2 * 2**30
"""Memory limit of the free stores. The last one is kept even if it is larger."""

MAX_STEPS = 32
"""Maximum number of step shapes that a store keeps."""

logger = safe_logger(__name__)


class StaticLean(Lean):
    """The lean pass with static steps. Results are copies: later steps do not change them.

    Raises:
        NotImplementedError: as for :class:`Lean`.
    """

    name = "static_lean"  # "lean" after a failed capture
    pools_stores = True

    def __init__(self, model: LanguageModel, linear_backend: LinearBackend) -> None:
        super().__init__(model, linear_backend)
        if self.softcap is not None or self.local_rotary is not None:
            raise NotImplementedError("no static steps with soft caps of scores or several rotary tables")
        if any(isinstance(layer.mlp, Mixture) for layer in self.layers):
            raise NotImplementedError("no static steps with a mixture of experts")
        self.device = self.embedding.device
        self.captures = self.device.type == "cuda"
        self.captured: weakref.WeakSet[Step] = weakref.WeakSet()
        self.side: torch.cuda.Stream | None = None  # of all captures: graphs share memory only on the same stream
        self.memory: _POOL_HANDLE | None = None  # of the graphs; it ends with its last graph and is then replaced
        self._outputs: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._idle: list[StaticStore] = []  # free stores, least recently used first
        # guards _idle; re-entrant, because garbage collection may release a store at any time
        self._lock = free_in_child(threading.RLock())

    def new_store(self, capacity: int) -> KeyValues:
        """Zeroed slots for one sequence, from the pool if one of its stores is large enough.

        The smallest such store is taken; among equals, the one with the most graphs.
        """
        if self.name == "lean":
            return super().new_store(capacity)
        capacity = -(-capacity // GRAIN) * GRAIN
        with torch.inference_mode(False), torch.no_grad(), self._on_device():
            with self._lock:
                fitting = [store for store in self._idle if store.capacity >= capacity]
                best = min(fitting, key=lambda store: (store.capacity, -len(store.steps)), default=None)
                self._idle = [store for store in self._idle if store is not best]
            if best is not None:
                best.data.zero_()  # type: ignore[union-attr]
                return best
            make = partial(StaticStore, len(self.layers), capacity, self.kv_heads, self.head_dim, self.embedding)
            try:
                return make()
            except torch.OutOfMemoryError:
                self.drop_idle()
                return make()

    def release(self, store: KeyValues) -> None:
        if not isinstance(store, StaticStore) or store.data is None or self.name == "lean":
            return
        with self._lock:
            if any(store is idle for idle in self._idle):
                return
            self._idle = [*self._idle, store][-MAX_IDLE_STORES:]
            while len(self._idle) > 1 and sum(idle.nbytes for idle in self._idle) > MAX_IDLE_BYTES:
                self._idle.pop(0)

    def drop_idle(self) -> None:
        """Free the memory of the free stores."""
        with self._lock:
            self._idle = []

    def __call__(self, segments: Sequence[Segment], capture: CaptureSpec | None) -> StepOutput:
        if capture is not None and len(segments) == 1 and not capture.early and self.name != "lean":
            output = self._static(segments[0], capture)
            if output is not None:
                return output
        return super().__call__(segments, capture)

    def _static(self, segment: Segment, capture: CaptureSpec) -> StepOutput | None:
        """Run a static step of one sequence; ``None`` if the lean pass must run it."""
        store = segment.store
        if not isinstance(store, StaticStore) or store.data is None or segment.end > store.capacity:
            return None
        if segment.masked or type(segment.source) not in (SourceProbe, NoneType):
            return None
        seen = _seen(segment, bounded=self.windows.smallest is not None)
        if seen is None:
            return None
        width = next((bucket for bucket in WIDTHS if bucket >= segment.width), None)
        depth = next((bucket for bucket in DEPTHS if bucket >= max(len(own) for _, own in seen)), None)
        if width is None or depth is None:
            return None
        with self._on_device():
            ranges = () if segment.source is None else segment.source.slots
            # a bucket: further passages are empty
            passages = max(4, 1 << (len(ranges) - 2).bit_length()) if len(ranges) > 1 else 0
            span = min(GRAIN << ((segment.end - 1) // GRAIN).bit_length(), store.capacity)
            shape = Shape(width, depth, span, capture, passages)
            inputs = self._inputs(segment, seen, shape, spare=store.capacity)
            step = self._step(store, shape, inputs)
            if step is None:
                return None
            step(self, inputs)
            # copies: other steps, possibly of other threads, write to the same memory
            width = segment.width
            masses = step.masses[: len(ranges), :width].T.clone() if ranges else None
            return StepOutput(step.logits[:width].clone(), step.hidden[:, :width].clone(), masses=masses)

    def _inputs(self, segment: Segment, seen: Sequence[tuple[int, Sequence[int]]], shape: Shape, spare: int) -> Tensor:
        """The step's inputs as a host tensor ``[5 + 2 * passages + depth, width]``.

        The rows are token ids, positions, slots, numbers of committed slots, the end of the source, the first slot and
        the end of each passage, and own slots (the last first).
        """
        source, *passages = (range(0),) if segment.source is None else segment.source.slots
        bounds = [bound for slots in passages for bound in (slots.start, slots.stop)]
        bounds += [0] * (2 * shape.passages - len(bounds))
        columns = [
            (token_id, position, slot, committed, source.stop, *bounds, *own, *[own[0]] * (shape.depth - len(own)))
            for token_id, position, slot, (committed, own) in zip(
                segment.token_ids, segment.positions, range(segment.start, segment.end), seen, strict=True
            )
        ]
        # padding repeats the first token, so that its values are finite if that token's are; no token sees its slot
        padding = (*columns[0][:2], spare, *columns[0][3:])
        rows = list(zip(*columns, *[padding] * (shape.width - len(columns)), strict=True))
        return torch.tensor(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _step(self, store: StaticStore, shape: Shape, inputs: Tensor) -> Step | None:
        """The store's step of a shape, captured at its first use; ``None`` if the capture fails.

        The lean pass is then used from now on.
        """
        step = store.steps.pop(shape, None)
        if step is None:
            try:
                step = Step(self, store, shape)
                if self.captures:
                    step.capture(self, inputs)
            except Exception as fault:  # drivers and operators raise many types; the lean pass needs no graph
                self.name = "lean"
                self.drop_idle()
                logger.warning("CUDA graphs cannot be used here; steps run kernel by kernel: %s", first_line(fault))
                return None
            while len(store.steps) >= MAX_STEPS:
                store.steps.pop(next(iter(store.steps)))
        store.steps[shape] = step  # the last entry is the most recently used
        return step

    def outputs(self, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """Output tensors ``[width, V]``, ``[N + 1, width, d]`` and ``[1 + passages, width]``, shared by such steps.

        They lie outside the graphs' memory pool, because any replay may write to the pool.
        """
        states = shape.capture.last - shape.capture.first + 2
        key = (shape.width, states, shape.passages)
        if key not in self._outputs:
            new = partial(self.embedding.new_zeros, dtype=torch.float32)
            self._outputs[key] = (
                new(shape.width, self.head.total),
                new(states, shape.width, self.embedding.shape[1]),
                new(1 + shape.passages, shape.width),
            )
        return self._outputs[key]

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class StaticStore(KeyValues):
    """Slots at a fixed address, in one tensor for all layers, and the steps captured on them.

    Attributes:
        data: keys and values, ``[2, L, kv_heads, capacity + 1, head_dim]``. Padding tokens use the last slot. ``None``
            after the store had to grow, because its graphs use the old address.
        steps: by shape, least recently used first.
    """

    def __init__(self, num_layers: int, capacity: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        super().__init__(num_layers, capacity)
        # zeroed for every sequence: a step multiplies masked slots too, and 0 * NaN is NaN
        data = like.new_zeros(2, num_layers, kv_heads, capacity + 1, head_dim)
        self.keys[:], self.values[:] = ([*part[:, :, :capacity].unbind()] for part in data)
        self.blocks[0] = (data,)  # one copy compacts all layers
        self.data: Tensor | None = data
        self.steps: dict[Shape, Step] = {}

    def reserve(self, capacity: int) -> None:
        if capacity > self.capacity:
            self.data = None
            self.steps.clear()
        super().reserve(capacity)


class Shape(NamedTuple):
    """The shape that identifies a step of a store."""

    width: int
    depth: int
    span: int
    capture: CaptureSpec
    passages: int = 0

    @property
    def own(self) -> int:
        """The row of the inputs from which on own slots stand."""
        return 5 + 2 * self.passages


class Step:
    """A step of fixed shape on one store: its inputs, its outputs, and its CUDA graph once captured.

    A step does not refer to the pass, so that the pass and its stores form no cycle. Its ``inputs`` are those of
    :meth:`StaticLean._inputs`. Its ``masses``, the attention on the source and on each passage, are zeros if they are
    not requested.
    """

    def __init__(self, lean: StaticLean, store: StaticStore, shape: Shape) -> None:
        assert store.data is not None
        self.keys, self.values = store.data
        self.shape = shape
        device = store.data.device
        self.inputs = torch.zeros(shape.own + shape.depth, shape.width, dtype=torch.int64, device=device)
        self.slots = torch.arange(shape.span, device=device)
        lean.rotary.reserve(store.capacity)  # no position exceeds the number of slots
        self.cos, self.sin = lean.rotary.cos, lean.rotary.sin  # a graph keeps them if longer tables are computed
        self.logits, self.hidden, self.masses = lean.outputs(shape)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, lean: StaticLean, inputs: Tensor) -> None:
        """Run the step and write ``logits``, ``hidden`` and ``masses``."""
        self.inputs.copy_(inputs, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run(lean)

    def capture(self, lean: StaticLean, inputs: Tensor) -> None:
        """Capture the graph. The warm-up writes the same values as the first replay."""
        if lean.side is None:
            lean.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current, side = torch.cuda.current_stream(), lean.side
        self.inputs.copy_(inputs, non_blocking=True)
        side.wait_stream(current)
        with torch.cuda.stream(side):  # includes the capture: a failed capture leaves its stream current
            self.run(lean)  # libraries initialise themselves at their first call, which must not be captured
            graph = torch.cuda.CUDAGraph()
            if lean.memory is None or not lean.captured:
                lean.memory = torch.cuda.graph_pool_handle()
            # thread_local: other threads may use the GPU during the capture
            with torch.cuda.graph(graph, pool=lean.memory, stream=side, capture_error_mode="thread_local"):
                self.run(lean)
        current.wait_stream(side)
        self.graph = graph
        lean.captured.add(self)

    def run(self, lean: StaticLean) -> None:
        """The step with fixed addresses and shapes, without synchronisation between device and host."""
        token_ids, positions, slots, committed, source_end = self.inputs[:5].unbind()  # each [W]
        masks = {
            window: self._mask(positions, committed, window, lean) for window in set(lean.windows.by_kind.values())
        }
        span = self.shape.span
        source_heads = self.shape.capture.source_heads
        bounds = self.inputs[5 : self.shape.own, :1]  # [2 * passages, 1]
        inside = torch.cat(  # [1 + passages, span]; the source is the prompt after its first token
            (
                (self.slots > 0)[None] & (self.slots < source_end[0]),
                (self.slots >= bounds[::2]) & (self.slots < bounds[1::2]),
            )
        ).float()
        masses: list[Tensor] = []

        def attention(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys, all_values = self.keys[layer], self.values[layer]  # [G, slots, head_dim]
            all_keys.index_copy_(1, slots, keys)
            all_values.index_copy_(1, slots, values)
            mask = masks[lean.windows[layer]]
            if heads := [head for number, head in source_heads if number == layer]:
                visible = mask[: query.shape[1]]  # the mask repeats for the query heads of a key-value head
                weights = attention_weights(query, all_keys[:, :span], heads, visible, scale=lean.scale)
                masses.append(inside @ weights.sum(dim=0).T)  # [1 + passages, W]
            return attend_folded(query, all_keys[:, :span], all_values[:, :span], mask, scale=lean.scale)

        last, states, _ = lean.decode(
            token_ids, self.cos[positions], self.sin[positions], attention, self.shape.capture
        )
        assert states is not None
        self.logits.copy_(lean.logits(last))
        self.hidden.copy_(states)
        if masses:
            self.masses.copy_(torch.stack(masses).sum(dim=0) / len(source_heads))

    def _mask(self, positions: Tensor, committed: Tensor, window: int | None, lean: StaticLean) -> Tensor:
        """The additive mask ``[groups * W, span]`` that :meth:`Segment.mask` computes on the host."""
        seen = self.slots < committed[:, None]  # [W, span]
        if window is not None:  # the number of a committed slot is its position
            seen &= self.slots > positions[:, None] - window
        lowest = torch.finfo(self.keys.dtype).min
        mask = torch.full(seen.shape, lowest, dtype=self.keys.dtype, device=seen.device).masked_fill_(seen, 0)
        first = self.shape.own
        # the n-th slot is n positions back
        own = self.inputs[first:] if window is None else self.inputs[first : first + window]
        return mask.scatter_(1, own.t(), 0).repeat(lean.heads // lean.kv_heads, 1)


def _seen(segment: Segment, *, bounded: bool) -> list[tuple[int, Sequence[int]]] | None:
    """For each token, the number of leading slots that it sees, and its own slots beyond them, the last first.

    The result is ``None`` for texts that are read back, which are chains of several tokens after branches.

    Args:
        bounded: whether a layer has a sliding window. The n-th own slot must then be n positions back. Otherwise the
            result is ``None``.
    """
    start, committed = segment.start, segment.committed
    if segment.is_chain:
        chain = list(segment.positions) == list(range(start, segment.end))
        return None if bounded and not chain else [(slot, [slot]) for slot in range(start, segment.end)]
    if len(segment.chains) < segment.width:
        return None
    seen: list[tuple[int, Sequence[int]]] = []
    for slot, position, (slots, _) in zip(range(start, segment.end), segment.positions, segment.chains, strict=True):
        own = [slot, *slots[::-1]]
        distances = [position - segment.tail_positions[before - committed] for before in own] if bounded else []
        if bounded and distances != list(range(len(own))):
            return None
        seen.append((committed, own))
    return seen
