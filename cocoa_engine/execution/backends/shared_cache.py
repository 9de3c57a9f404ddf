"""The fast backend: one forward pass for all branches of all sequences. Branches of a sequence share its cache.

The leaves of all sequences are fed as tokens of one packed pass. Positions are explicit, and a mask limits each leaf to
the committed prefix of its sequence and its own branch. When a branch is committed, its few slots are moved next to the
prefix, and the slots of the other branches become free.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, StepOutput, TokenTree, only_paths
from cocoa_engine.execution.backends.prefixes import SHORTEST, PrefixCache, common_length
from cocoa_engine.execution.forward.base import Forward, Probe, Segment
from cocoa_engine.execution.forward.kv_store import KeyValues
from cocoa_engine.execution.forward.source_attention import SourceProbe
from cocoa_engine.forks import free_in_child
from cocoa_engine.logs import safe_logger
from cocoa_engine.model.hidden_states import CaptureSpec

logger = safe_logger(__name__)

PREFILL_CHUNK = 2048
"""Prompt tokens in one pass. The limit bounds the working memory of long prompts."""

MASK_CELLS = 2**26
"""Maximum number of entries (tokens x slots) in the mask of a chunk. Chunks of very long prompts are therefore smaller.
With soft-capped scores, as in Gemma 2, the mask is repeated for the query heads that share a key-value head."""

SPARE_SLOTS = 64
"""Slots reserved beyond the longest possible text. A wider risk point near its end allocates more."""


class SharedTree(TokenTree):
    """One sequence and its slots.

    Attributes:
        token_ids: the committed tokens.
        store: the keys and values of all slots.
        slots: by fed path, its slots beyond the committed ones.
        read: by path, the slots of the read-backs after it, in order.
        tail_positions: positions of the slots beyond the committed ones.
        used: number of used slots.
        masked: by layer, the masked heads.
        twin: the same sequence with masked heads, if requested.
        probe: called in each layer of a step, see :data:`~cocoa_engine.execution.forward.base.Probe`.
    """

    keeps_rest = True

    def __init__(self, backend: SharedCache, prompt: Sequence[int], store: KeyValues, capture: CaptureSpec) -> None:
        super().__init__(prompt)
        self.backend = backend
        self.token_ids = list(prompt)
        self.store = store
        self.capture = capture
        self.slots: dict[Path, list[int]] = {(): []}
        self.read: dict[Path, list[range]] = {}
        self.tail_positions: list[int] = []
        self.used = 0
        self.masked = _by_layer(capture.masked)
        self.twin: SharedTree | None = None
        self.probe: Probe | None = None

    @property
    def source(self) -> range:
        """The slots whose attention mass is the source attention; empty for a prompt of one token."""
        return range(1, self.prompt_tokens)  # the first token attracts attention whatever it is

    def segment(self, asked: FeedRequest, padding: int = 0) -> Segment:
        """The segment that feeds the last tokens of some paths, or some read-backs. :meth:`fed` adds them to the tree.

        Args:
            padding: number of padding tokens after those of paths. The next pass overwrites their slots.
        """
        readings = [one for one in asked if isinstance(one, ReadBack)]
        return self._reading_segment(readings) if readings else self._leaf_segment(only_paths(asked), padding)

    def _leaf_segment(self, paths: list[Path], padding: int) -> Segment:
        slots = dict(self.slots)
        for number, path in enumerate(paths):
            slots[path] = [*slots[path[:-1]], self.used + number]
        paths = [*paths, *[paths[0]] * padding]
        self._ensure_capacity(len(paths))
        alone = len(paths) == 1 and self.used == self.committed
        positions = [self.committed + len(path) - 1 for path in paths]
        segment = Segment(
            self.store,
            self.used,
            [path[-1] for path in paths],
            positions,
            self.committed,
            own_slots=None if alone else [slots[path] for path in paths],
            tail_positions=[*self.tail_positions, *positions],
            masked=self.masked,
        )
        segment.probe = self.probe
        if self.capture.source_heads and not self.masked:
            segment.source = SourceProbe(self.capture.source_heads, self.source, self.passages)
        return segment

    def _reading_segment(self, readings: Sequence[ReadBack]) -> Segment:
        # one chain per read-back: listing the slots of every token would take memory quadratic in the length
        self._ensure_capacity(_width(readings))
        positions = [position for reading in readings for position in self._positions(reading)]
        chains = [(self._seen(reading.after), len(reading.token_ids)) for reading in readings]
        return Segment(
            self.store,
            self.used,
            [token_id for reading in readings for token_id in reading.token_ids],
            positions,
            self.committed,
            tail_positions=[*self.tail_positions, *positions],
            masked=self.masked,
            chains=chains,
        )

    def _ensure_capacity(self, width: int) -> None:
        if self.used + width > self.store.capacity:
            self.store.reserve(max(self.used + width + SPARE_SLOTS, self.store.capacity * 3 // 2))

    def _seen(self, path: Path) -> list[range]:
        """The uncommitted slots that the next read-back of a path sees."""
        return [*(range(slot, slot + 1) for slot in self.slots[path]), *self.read.get(path, ())]

    def _positions(self, reading: ReadBack) -> range:
        start = self.committed + len(reading.after) + sum(map(len, self.read.get(reading.after, ())))
        return range(start, start + len(reading.token_ids))

    def fed(self, paths: FeedRequest) -> None:
        """Record that a request has been fed, in the order of its segment."""
        for path in paths:
            if isinstance(path, ReadBack):
                self.tail_positions.extend(self._positions(path))
                slots = range(self.used, self.used + len(path.token_ids))
                self.read.setdefault(path.after, []).append(slots)
                self.used = slots.stop
            else:
                self.slots[path] = [*self.slots[path[:-1]], self.used]
                self.tail_positions.append(self.committed + len(path) - 1)
                self.used += 1
        self.forward_passes += 1
        self.fed_tokens += _width(paths)

    @torch.no_grad()
    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        depth = len(path)
        self.store.compact(self.slots[path], self.committed)
        self.token_ids += path
        self.committed += depth
        rest = {fed[depth:]: slots[depth:] for fed, slots in self.slots.items() if fed[:depth] == path}
        self.slots = rest if keep_rest else {(): []}
        self.read = {}
        self.used = 1 + max((slot for slots in self.slots.values() for slot in slots), default=self.committed - 1)
        self.tail_positions = self.tail_positions[depth : depth + self.used - self.committed]
        if self.twin is not None:
            self.twin.commit(path, keep_rest=keep_rest)

    def close(self) -> None:
        self.backend.closed(self)


class SharedCache(Backend[SharedTree]):
    """The fast backend, for models with attention layers only."""

    name = "shared_cache"

    def __init__(self, forward: Forward, prefix_cache_bytes: int = 0) -> None:
        super().__init__(forward.model)
        self.forward = forward
        self.max_sequences = forward.max_sequences
        self.prefixes = PrefixCache(0 if forward.whole_prompts else prefix_cache_bytes)
        self._open: weakref.WeakSet[SharedTree] = weakref.WeakSet()
        # guards the set and its stores; re-entrant, because garbage collection may close a tree in this thread
        self._lock = free_in_child(threading.RLock())

    @property
    def forward_name(self) -> str:
        return self.forward.name

    @property
    def native(self) -> bool:
        return self.forward.native

    @property
    def cost_of_a_row(self) -> float:
        return self.forward.cost_of_a_row

    @property
    def masks_heads(self) -> bool:
        return self.forward.masks_heads

    @property
    def sees_attention(self) -> bool:
        return self.forward.masks_heads or super().sees_attention  # an attention that masks heads sees them

    def open(self, prompts: Sequence[Sequence[int]], reserve_tokens: int, capture: CaptureSpec) -> list[SharedTree]:
        plain = capture._replace(masked=())
        stores = [self.forward.new_store(len(prompt) + reserve_tokens) for prompt in prompts]
        trees = [SharedTree(self, prompt, store, plain) for prompt, store in zip(prompts, stores, strict=True)]
        if capture.masked:
            for tree, prompt in zip(trees, prompts, strict=True):
                tree.twin = SharedTree(self, prompt, self.forward.new_store(len(prompt) + reserve_tokens), capture)
        with self._lock:
            self._open.update(trees)
        return trees

    def closed(self, tree: SharedTree) -> None:
        """Free a tree's slots. The prefix cache may keep its keys and values for later prompts."""
        with self._lock:
            if tree not in self._open:
                return
            self._open.discard(tree)
        known = tree.token_ids[: min(tree.used, tree.committed)]  # the prompt may have been fed only in part
        tree.used = 0  # first, so that other threads never see used slots in the empty store
        store, tree.store = tree.store, KeyValues(0, 0)
        try:
            self.prefixes.keep(known, store, given=not self.forward.pools_stores)
        except (MemoryError, RuntimeError) as fault:  # torch.OutOfMemoryError is a RuntimeError
            logger.debug("no memory for a copy of %d tokens' keys and values: %s", len(known), fault)
        finally:
            self.forward.release(store)
            if tree.twin is not None:
                store, tree.twin.store = tree.twin.store, KeyValues(0, 0)
                self.forward.release(store)

    def prefill_some(self, tree: SharedTree, max_tokens: int | None = None) -> Tensor | None:
        with self.model.exclusive():
            self._copy_shared_prefix(tree)
        start = tree.used
        end = None if self.forward.whole_prompts else start + _chunk(start, max_tokens)
        chunk = tree.token_ids[start:end]
        positions = range(start, start + len(chunk))
        with self.forward.exclusive():
            output = self.forward([Segment(tree.store, start, chunk, positions, start)], None)
        tree.forward_passes += 1
        tree.used += len(chunk)
        tree.prompt_read = tree.used
        if tree.used < tree.committed:
            return None
        if tree.twin is not None:  # masked heads apply after the prompt, so the twin copies it
            with self.model.exclusive():
                tree.twin.store.fill(tree.store, tree.used)
            tree.twin.used = tree.used
        return output.logits[-1].float()

    def _copy_shared_prefix(self, tree: SharedTree) -> None:
        """Copy the keys and values of the longest prefix shared with another sequence, up to the prompt's last token.

        The last token itself is always fed, for its logits. This runs before every chunk, because another sequence with
        the same prefix may have been fed further in the meantime.
        """
        start = tree.used
        if not self.prefixes.max_bytes or tree.committed <= start + SHORTEST:
            return
        prompt = tree.token_ids[:-1]
        found = self.prefixes.longest(prompt) if start == 0 else None
        best, length = found if found is not None else (None, start + SHORTEST - 1)
        with self._lock:  # held until the copy is done, because a released store may be reused at once
            for other in list(self._open):
                store = other.store
                shared = min(common_length(other.token_ids, prompt), other.used)
                if other is not tree and shared > length:
                    best, length = store, shared
            if best is not None:
                tree.store.fill(best, length, start)
                tree.used = length
                tree.cached_tokens += length - start

    def step(self, requests: Sequence[tuple[SharedTree, FeedRequest]]) -> list[StepOutput]:
        size = self.max_sequences or len(requests)
        outputs: list[StepOutput] = []
        for first in range(0, len(requests), size):
            outputs += self._step(requests[first : first + size])
        return outputs

    def _step(self, requests: Sequence[tuple[SharedTree, FeedRequest]]) -> list[StepOutput]:
        trees = [tree for tree, _ in requests]
        asked = [paths for _, paths in requests]
        twins = [(tree.twin, paths) for tree, paths in zip(trees, asked, strict=True) if tree.twin is not None]
        with self.forward.exclusive():
            rows = [*zip(trees, asked, strict=True), *twins]
            padding = self.forward.padding_rows(sum(_width(paths) for _, paths in rows))
            segments = [tree.segment(paths) for tree, paths in rows[:-1]]
            segments.append(rows[-1][0].segment(rows[-1][1], padding))
            output = self.forward(segments, trees[0].capture)
        assert output.hidden is not None
        logits = output.logits.float()
        outputs, start, masked = [], 0, sum(map(_width, asked))  # the twins' rows follow all others
        for tree, paths in zip(trees, asked, strict=True):
            tree.fed(paths)
            end = start + _width(paths)
            others = None if output.early is None else output.early[:, start:end]
            if tree.twin is not None:
                tree.twin.fed(paths)
                tree.fed_tokens += end - start
                others = logits[None, masked : masked + end - start]
                masked += end - start
            source = output.source[start:end] if output.source is not None and tree.source else None
            count = 0 if source is None or output.passages is None else len(tree.passages)
            passages = output.passages[start:end, :count] if output.passages is not None and count else None
            outputs.append(StepOutput(logits[start:end], output.hidden[:, start:end], others, source, passages))
            start = end
        return outputs


def _width(asked: FeedRequest) -> int:
    """Number of tokens to feed."""
    return sum(len(one.token_ids) if isinstance(one, ReadBack) else 1 for one in asked)


def _chunk(start: int, max_tokens: int | None) -> int:
    """Number of prompt tokens to feed next, at most."""
    width = min(max_tokens or PREFILL_CHUNK, PREFILL_CHUNK)
    return max(1, min(width, MASK_CELLS // (start + width)))


def _by_layer(heads: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    return {layer: [head for other, head in heads if other == layer] for layer, _ in heads}
