"""The fast backend: one forward pass for all branches of all sequences. Branches of a sequence share its cache.

The leaves of all sequences are fed as tokens of one packed pass. Positions are explicit, and a mask limits each leaf to
the committed prefix of its sequence and its own branch. When a branch is committed, its few slots are moved next to the
prefix, and the slots of the other branches become free.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, StepOutput, TokenTree
from cocoa_engine.execution.backends.prefixes import SHORTEST, PrefixCache, common_length
from cocoa_engine.execution.forward.base import Forward, Segment
from cocoa_engine.execution.forward.kv_store import KeyValues
from cocoa_engine.execution.forward.source_attention import SourceProbe, probe_of
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
        probe: measures the attention of a step instead of the source attention.
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
        self.probe: SourceProbe | None = None

    def segment(self, asked: FeedRequest) -> Segment:
        """The segment that feeds the last tokens of some paths, or some read-backs."""
        width = _width(asked)
        if self.used + width > self.store.capacity:
            self.store.reserve(max(self.used + width + SPARE_SLOTS, self.store.capacity * 3 // 2))
        slots = dict(self.slots)
        positions: list[int] = []
        token_ids: list[int] = []
        # one chain per read-back: listing the slots of every token would take memory quadratic in the length
        chains: list[tuple[list[range], int]] = []
        for each in asked:
            if isinstance(each, ReadBack):
                before = self.read.get(each.after, [])
                start = self.committed + len(each.after) + sum(map(len, before))
                positions += range(start, start + len(each.token_ids))
                token_ids += each.token_ids
                seen = [range(slot, slot + 1) for slot in slots[each.after]]
                chains.append(([*seen, *before], len(each.token_ids)))
            else:
                slots[each] = [*slots[each[:-1]], self.used + len(token_ids)]
                positions.append(self.committed + len(each) - 1)
                token_ids.append(each[-1])
        alone = width == 1 and self.used == self.committed
        segment = Segment(
            self.store,
            self.used,
            token_ids,
            positions,
            self.committed,
            own_slots=None if alone or chains else [slots[path] for path in cast("Sequence[Path]", asked)],
            tail_positions=[*self.tail_positions, *positions],
            masked=self.masked,
            chains=chains or None,
        )
        if not chains and not self.masked:
            segment.source = self.probe or probe_of(self.capture.source_heads, self.prompt_tokens, self.passages)
        return segment

    def fed(self, asked: FeedRequest, segment: Segment) -> None:
        """Record that a request has been fed by its segment."""
        slot = segment.start
        for each in asked:
            if isinstance(each, ReadBack):
                self.read.setdefault(each.after, []).append(range(slot, slot + len(each.token_ids)))
                slot += len(each.token_ids)
            else:
                self.slots[each] = [*self.slots[each[:-1]], slot]
                slot += 1
        self.tail_positions += segment.positions
        self.used = segment.end
        self.forward_passes += 1
        self.fed_tokens += segment.width

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
        self.native, self.cost_of_a_row = forward.native, forward.cost_of_a_row
        self.masks_heads = forward.masks_heads
        self.prefixes = PrefixCache(0 if forward.whole_prompts else prefix_cache_bytes)
        self._open: weakref.WeakSet[SharedTree] = weakref.WeakSet()
        # guards the set and its stores; re-entrant, because garbage collection may close a tree in this thread
        self._lock = free_in_child(threading.RLock())

    @property
    def forward_name(self) -> str:
        return self.forward.name

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
        rows = [*requests, *((tree.twin, asked) for tree, asked in requests if tree.twin is not None)]
        with self.forward.exclusive():
            segments = [tree.segment(asked) for tree, asked in rows]
            output = self.forward(segments, requests[0][0].capture)
        assert output.hidden is not None
        for (tree, asked), segment in zip(rows, segments, strict=True):
            tree.fed(asked, segment)
        logits = output.logits.float()
        outputs, start = [], 0
        masked = sum(segment.width for segment in segments[: len(requests)])  # the twins' rows follow all others
        for (tree, _), segment in zip(requests, segments, strict=False):
            end = start + segment.width
            others = None if output.early is None else output.early[:, start:end]
            if tree.twin is not None:
                tree.fed_tokens += segment.width
                others = logits[None, masked : masked + segment.width]
                masked += segment.width
            # a prompt of one token has no source
            measured = output.masses is not None and tree.prompt_tokens > 1
            masses = output.masses[start:end, : 1 + len(tree.passages)] if measured else None  # type: ignore[index]
            outputs.append(StepOutput(logits[start:end], output.hidden[:, start:end], others, masses))
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
