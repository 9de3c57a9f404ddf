"""The fast backend: one forward pass for all branches of all sequences. Branches of a sequence share its cache.

The leaves of all sequences are fed as tokens of one packed pass. Positions are explicit, and a mask limits each leaf to
the committed prefix of its sequence and its own branch. When a branch is committed, its few slots are moved next to the
prefix, and the slots of the other branches become free. The keys and values of past sequences are kept for prompts that
share a prefix with them.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import cast

import torch
from torch import Tensor, nn

from cocoa_engine.errors import safe_logger
from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, ReadBack, TokenTree
from cocoa_engine.execution.forward.base import Forward, KeyValues, Segment, StepOutput
from cocoa_engine.execution.forward.source_attention import probe_of
from cocoa_engine.interruptions import free_in_child
from cocoa_engine.model import light_model
from cocoa_engine.model.language_model import CaptureSpec, is_changed

logger = safe_logger(__name__)

PREFILL_CHUNK = 2048
"""Prompt tokens in one pass. The limit bounds the working memory of long prompts."""

MASK_CELLS = 2**26
"""Maximum number of entries (tokens x slots) in the mask of a chunk. Chunks of very long prompts are therefore smaller.
With soft-capped scores, as in Gemma 2, the mask is repeated for the query heads that share a key-value head."""

SPARE_SLOTS = 64
"""Slots reserved beyond the longest possible text. A wider risk point near its end allocates more."""


SHORTEST = 64
"""Shortest prefix that is cached. Computing a shorter one takes about as long as copying it."""

_USED = 7 / 8
"""Smallest share of used slots at which a store is kept without a copy."""


class PrefixCache:
    """Prefixes of past sequences. The least recently used entry is dropped first.

    Args:
        max_bytes: memory limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[tuple[int, ...], KeyValues] = OrderedDict()
        self._lock = free_in_child(threading.RLock())  # re-entrant: garbage collection may close a tree in this thread

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return sum(store.nbytes for store in list(self._entries.values()))

    def longest(self, token_ids: Sequence[int]) -> tuple[KeyValues, int] | None:
        """The entry that shares the longest prefix with a sequence, and the length of that prefix in tokens.

        ``None`` if no entry shares at least :data:`SHORTEST` tokens.
        """
        with self._lock:
            best = max(list(self._entries), key=lambda ids: common_length(ids, token_ids), default=())
            length, store = common_length(best, token_ids), self._entries.get(best)
            if store is None or length < SHORTEST:
                return None
            if best in self._entries:
                self._entries.move_to_end(best)
            return store, length

    def keep(self, token_ids: Sequence[int], store: KeyValues, *, handed_over: bool = False) -> None:
        """Add a sequence, unless it is already covered, too short or too large.

        Args:
            handed_over: whether the caller gives up the store, so that it need not be copied.
        """
        ids = tuple(token_ids)
        size = store.nbytes * len(ids) // max(store.capacity, 1)
        if len(ids) < SHORTEST or size > self.max_bytes:
            return
        with self._lock:
            lengths = {entry: common_length(entry, ids) for entry in list(self._entries)}
            if any(length == len(ids) for length in lengths.values()):
                return
            as_it_is = handed_over and len(ids) >= _USED * store.capacity and store.nbytes <= self.max_bytes
            stored = store if as_it_is else store.prefix(len(ids))
            for entry, length in lengths.items():
                if length == len(entry):  # the new sequence extends this one
                    self._entries.pop(entry, None)
            self._entries[ids] = stored
            while self.nbytes > self.max_bytes:
                self._entries.popitem(last=False)


_QUANTISERS = ("torchao.", "bitsandbytes.", "gptqmodel.", "awq.")
_KNOWN_PACKAGES = ("transformers.", "transformers_modules.", "torch.", light_model.__name__, *_QUANTISERS)


def depends_on_weights_alone(modules: Sequence[nn.Module]) -> bool:
    """Whether keys and values depend on the weights alone, and not on hooks or switchable adapters."""
    if not all(kind.__module__.startswith(_KNOWN_PACKAGES) for kind in set(map(type, modules))):
        return False
    for module in filter(is_changed, modules):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(str(getattr(hook, "__module__", "")).startswith(("transformers.", "torch.")) for hook in hooks):
            return False
        is_compiled = type(module).__module__.startswith("torch._dynamo")
        if "forward" in module.__dict__ and not hasattr(module, "_hf_hook") and not is_compiled:
            return False  # hooks of accelerate only move tensors, and compiled models compute the same
    return True


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class SharedTree(TokenTree):
    """One sequence and its slots.

    Attributes:
        slots: by fed path, its slots beyond the committed ones.
        read: by path, the slots of the read-backs after it, in order.
        tail_positions: positions of the slots beyond the committed ones.
        used: number of used slots.
        twin: the same sequence with masked heads, if requested.
    """

    keeps_rest = True

    def __init__(self, backend: "SharedCache", prompt: Sequence[int], store: KeyValues, capture: CaptureSpec) -> None:
        super().__init__(prompt, capture)
        self.backend = backend
        self.store = store
        self.slots: dict[Path, list[int]] = {(): []}
        self.read: dict[Path, list[int]] = {}
        self.tail_positions: list[int] = []
        self.used = 0
        self.masked = {layer: [head for other, head in capture.masked if other == layer] for layer, _ in capture.masked}
        self.twin: SharedTree | None = None

    def segment(self, asked: FeedRequest) -> Segment:
        """The segment that feeds the last tokens of some paths, or some read-backs."""
        slots = dict(self.slots)
        token_ids, positions, chains = list[int](), list[int](), list[tuple[Sequence[int], int]]()
        for entry in asked:
            fed: Sequence[int]
            if isinstance(entry, ReadBack):
                seen, fed = [*slots[entry.after], *self.read.get(entry.after, ())], entry.token_ids
            else:
                seen, fed = slots[entry[:-1]], entry[-1:]
                slots[entry] = [*seen, self.used + len(token_ids)]
            chains.append((seen, len(fed)))
            positions += range(self.committed + len(seen), self.committed + len(seen) + len(fed))
            token_ids += fed
        end = self.used + len(token_ids)
        if end > self.store.capacity:
            self.store.reserve(max(end + SPARE_SLOTS, self.store.capacity * 3 // 2))
        reads = isinstance(asked[0], ReadBack)
        segment = Segment(
            self.store,
            self.used,
            token_ids,
            positions,
            self.committed,
            chains=None if end == self.committed + 1 and not reads else chains,
            tail_positions=[*self.tail_positions, *positions],
            masked=self.masked,
        )
        if not reads and not self.masked:
            segment.source = self.probe or probe_of(self.capture.source_heads, self.prompt_tokens, self.passages)
        return segment

    def fed(self, asked: FeedRequest, segment: Segment) -> None:
        """Record that a request has been fed by its segment."""
        slot = segment.start
        for entry, (seen, length) in zip(asked, segment.chains, strict=True):
            if isinstance(entry, ReadBack):
                self.read.setdefault(entry.after, []).extend(range(slot, slot + length))
            else:
                self.slots[cast("Path", entry)] = [*seen, slot]
            slot += length
        self.tail_positions += segment.positions
        self.used = segment.end
        self.forward_passes += 1
        self.fed_tokens += segment.width

    @torch.no_grad()
    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        depth = len(path)
        self.store.compact(self.slots[path], self.committed)
        super().commit(path)
        rest = {fed[depth:]: slots[depth:] for fed, slots in self.slots.items() if fed[:depth] == path}
        self.slots = rest if keep_rest else {(): []}
        self.read = {}
        self.used = 1 + max((slot for slots in self.slots.values() for slot in slots), default=self.committed - 1)
        self.tail_positions = self.tail_positions[depth : depth + self.used - self.committed]
        if self.twin is not None:
            self.twin.commit(path, keep_rest=keep_rest)

    def close(self) -> None:
        """Free the slots. The prefix cache may keep the keys and values for later prompts."""
        backend = self.backend
        with backend.lock:
            if self not in backend.open_trees:
                return
            backend.open_trees.discard(self)
        token_ids = self.token_ids[: min(self.used, self.committed)]  # the prompt may have been fed only in part
        self.used = 0  # first, so that other threads never see used slots in the empty store
        store, self.store = self.store, KeyValues(0, 0)
        try:
            backend.prefixes.keep(token_ids, store, handed_over=not backend.forward.pools_stores)
        except (MemoryError, RuntimeError) as fault:  # torch.OutOfMemoryError is a RuntimeError
            logger.debug("no memory for a copy of %d tokens' keys and values: %s", len(token_ids), fault)
        finally:
            backend.forward.release(store)
            if self.twin is not None:
                store, self.twin.store = self.twin.store, KeyValues(0, 0)
                backend.forward.release(store)


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
        self.open_trees: weakref.WeakSet[SharedTree] = weakref.WeakSet()
        # of the set and its stores; re-entrant, because garbage collection may close a tree in this thread
        self.lock = free_in_child(threading.RLock())

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
        with self.lock:
            self.open_trees.update(trees)
        return trees

    def prefill_some(self, tree: SharedTree, max_tokens: int | None = None) -> Tensor | None:
        with self.model.exclusive():
            self._copy_shared_prefix(tree)
        start = tree.used
        width = min(max_tokens or PREFILL_CHUNK, PREFILL_CHUNK)
        width = max(1, min(width, MASK_CELLS // (start + width)))
        chunk = tree.token_ids[start : None if self.forward.whole_prompts else start + width]
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
        match = self.prefixes.longest(prompt) if start == 0 else None
        best, length = match if match is not None else (None, start + SHORTEST - 1)
        with self.lock:  # held until the copy is done, because a released store may be reused at once
            for other in list(self.open_trees):
                store = other.store
                shared = min(common_length(other.token_ids, prompt), other.used)
                if other is not tree and shared > length:
                    best, length = store, shared
            if best is not None:
                tree.store.fill(best, length, start)
                tree.used = length
                tree.cached_tokens += length - start

    def step(self, requests: Sequence[tuple[SharedTree, FeedRequest]]) -> list[StepOutput]:
        rows = [*requests, *((tree.twin, asked) for tree, asked in requests if tree.twin is not None)]
        with self.forward.exclusive():
            segments = [tree.segment(asked) for tree, asked in rows]
            output = self.forward(segments, requests[0][0].capture)
        for (tree, asked), segment in zip(rows, segments, strict=True):
            tree.fed(asked, segment)
        output = output._replace(logits=output.logits.float())
        outputs, start = [], 0
        masked = sum(segment.width for segment in segments[: len(requests)])  # the twins' rows follow all others
        for (tree, _), segment in zip(requests, segments, strict=False):
            part = output.rows(start, start := start + segment.width)
            if tree.twin is not None:
                tree.fed_tokens += segment.width
                part = part._replace(others=output.logits[None, masked : masked + segment.width])
                masked += segment.width
            if part.masses is not None:  # a prompt of one token has no source
                part = part._replace(
                    masses=part.masses[:, : 1 + len(tree.passages)] if tree.prompt_tokens > 1 else None
                )
            outputs.append(part)
        return outputs
