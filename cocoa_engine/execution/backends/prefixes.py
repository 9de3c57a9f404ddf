"""Keys and values of past sequences, for prompts that begin as they did."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from cocoa_engine.execution.forward.kv_store import KeyValues
from cocoa_engine.model.language_model import LanguageModel

SHORTEST = 64
"""A shorter common beginning is computed again: that takes as long as copying it."""

_USED = 7 / 8
"""A store with more slots unused is copied rather than kept as it is."""


class PrefixCache:
    """The beginnings of past sequences, the least recently used dropped first.

    Args:
        max_bytes: memory for them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[tuple[int, ...], KeyValues] = OrderedDict()
        self._lock = threading.RLock()  # a stream collected meanwhile closes its tree in this thread

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return sum(store.nbytes for store in list(self._entries.values()))

    def longest(self, token_ids: Sequence[int]) -> tuple[KeyValues, int] | None:
        """The entry that shares the longest beginning with a sequence, and that beginning's length."""
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
        """Keep a sequence's first slots, unless they are known or too few or too many.

        Args:
            given: nobody else uses the store from now on, so that it need not be copied.
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
                if length == len(known):  # this sequence goes on where that one ended
                    self._entries.pop(known, None)
            self._entries[ids] = kept
            while self.nbytes > self.max_bytes:
                self._entries.popitem(last=False)


_QUANTISERS = ("torchao.", "bitsandbytes.", "gptqmodel.", "awq.")
_KNOWN_PACKAGES = ("transformers.", "transformers_modules.", "torch.", *_QUANTISERS)


def depends_on_weights_alone(model: LanguageModel) -> bool:
    """Whether keys and values of now hold later, too: not where a hook or an adapter that is switched has a say."""
    for module in model.model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(str(getattr(hook, "__module__", "")).startswith(("transformers.", "torch.")) for hook in hooks):
            return False
        kind = type(module).__module__
        if not kind.startswith(_KNOWN_PACKAGES):
            return False
        if "forward" in module.__dict__ and not hasattr(module, "_hf_hook") and not kind.startswith("torch._dynamo"):
            return False  # accelerate moves tensors, a compiled model does the same as it did
    return True


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of tokens at which two sequences begin alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
