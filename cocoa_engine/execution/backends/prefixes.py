"""A cache of the keys and values of past sequences, for prompts that share a prefix with them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from cocoa_engine.execution.forward.kv_store import KeyValues
from cocoa_engine.forks import free_in_child
from cocoa_engine.model import light_model
from cocoa_engine.model.language_model import LanguageModel

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
            known = list(self._entries.items())
            found = max(known, key=lambda entry: common_length(entry[0], token_ids), default=None)
            length = 0 if found is None else common_length(found[0], token_ids)
            if found is None or length < SHORTEST:
                return None
            if found[0] in self._entries:
                self._entries.move_to_end(found[0])
            return found[1], length

    def keep(self, token_ids: Sequence[int], store: KeyValues, *, given: bool = False) -> None:
        """Add a sequence, unless it is already covered, too short or too large.

        Args:
            given: whether the caller gives up the store, so that it need not be copied.
        """
        ids = tuple(token_ids)
        size = store.nbytes * len(ids) // max(store.capacity, 1)
        if len(ids) < SHORTEST or size > self.max_bytes:
            return
        with self._lock:
            lengths = {known: common_length(known, ids) for known in list(self._entries)}
            if any(length == len(ids) for length in lengths.values()):
                return
            as_it_is = given and len(ids) >= _USED * store.capacity and store.nbytes <= self.max_bytes
            kept = store if as_it_is else store.prefix(len(ids), len(ids))
            for known, length in lengths.items():
                if length == len(known):  # the new sequence extends this one
                    self._entries.pop(known, None)
            self._entries[ids] = kept
            while self.nbytes > self.max_bytes:
                self._entries.popitem(last=False)


_QUANTISERS = ("torchao.", "bitsandbytes.", "gptqmodel.", "awq.")
_KNOWN_PACKAGES = ("transformers.", "transformers_modules.", "torch.", light_model.__name__, *_QUANTISERS)


def depends_on_weights_alone(model: LanguageModel) -> bool:
    """Whether keys and values depend on the weights alone, and not on hooks or switchable adapters."""
    for module in model.model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(str(getattr(hook, "__module__", "")).startswith(("transformers.", "torch.")) for hook in hooks):
            return False
        kind = type(module).__module__
        if not kind.startswith(_KNOWN_PACKAGES):
            return False
        if "forward" in module.__dict__ and not hasattr(module, "_hf_hook") and not kind.startswith("torch._dynamo"):
            return False  # hooks of accelerate only move tensors, and compiled models compute the same
    return True


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
