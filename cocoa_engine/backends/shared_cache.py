"""All branches of all sequences in one forward pass; the branches of a sequence share its keys and values.

The live tips of all sequences are fed as tokens of one packed pass: explicit positions, and a mask by which a tip sees
its sequence's committed prefix and its own branch only. When a branch is kept its few slots are moved down to follow
the prefix, and the other branches' slots are free again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.backends.base import Backend, Path, StepOutput, TokenTree
from cocoa_engine.forward.base import Forward, Segment
from cocoa_engine.forward.store import KeyValues
from cocoa_engine.hidden_states import Wanted

PREFILL_CHUNK = 2048
"""Tokens of a prompt fed at once: what a long prompt needs beside its keys and values does not grow with it."""

SPARE_SLOTS = 64
"""Slots allotted beyond the longest possible text; a wider risk point near its end gets more when it comes."""


class SharedTree(TokenTree):
    """One sequence and its slots."""

    def __init__(self, prompt: Sequence[int], store: KeyValues, wanted: Wanted) -> None:
        super().__init__(prompt)
        self.prompt = list(prompt)
        self.store = store
        self.wanted = wanted
        self.slots: dict[Path, list[int]] = {(): []}  # beyond the committed ones, of each fed path
        self.tail_positions: list[int] = []  # of the slots beyond the committed ones
        self.used = 0

    def segment(self, paths: Sequence[Path]) -> Segment:
        """The last tokens of some paths, as the next tokens to feed; :meth:`fed` makes them part of the tree."""
        slots = dict(self.slots)
        for number, path in enumerate(paths):
            slots[path] = [*slots[path[:-1]], self.used + number]
        self.store.reserve(self.used + len(paths))
        alone = len(paths) == 1 and self.used == self.committed
        positions = [self.committed + len(path) - 1 for path in paths]
        return Segment(
            self.store,
            self.used,
            [path[-1] for path in paths],
            positions,
            self.committed,
            None if alone else [slots[path] for path in paths],
            [*self.tail_positions, *positions],
        )

    def fed(self, paths: Sequence[Path]) -> None:
        """Note that the paths have been fed, in the order of their segment."""
        for path in paths:
            self.slots[path] = [*self.slots[path[:-1]], self.used]
            self.tail_positions.append(self.committed + len(path) - 1)
            self.used += 1
        self.forward_passes += 1
        self.fed_tokens += len(paths)

    @torch.no_grad()
    def commit(self, path: Path) -> None:
        kept = {fed[len(path) :]: slots[len(path) :] for fed, slots in self.slots.items() if fed[: len(path)] == path}
        self.store.compact(self.slots[path], self.committed)
        self.committed += len(path)
        self.slots = kept
        self.used = 1 + max((slot for slots in kept.values() for slot in slots), default=self.committed - 1)
        self.tail_positions = self.tail_positions[len(path) : len(path) + self.used - self.committed]

    def drop_branches(self) -> None:
        self.slots = {(): []}
        self.tail_positions = []
        self.used = self.committed

    def close(self) -> None:
        self.store = KeyValues(0, 0)


class SharedCache(Backend):
    """The fast backend, for attention-only models."""

    name = "shared_cache"

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward.model)
        self.forward = forward

    @property
    def forward_name(self) -> str:
        return self.forward.name

    def open(self, prompts: Sequence[Sequence[int]], room: int, wanted: Wanted) -> list[TokenTree]:
        layers = self.model.num_layers
        return [SharedTree(prompt, KeyValues(layers, len(prompt) + room), wanted) for prompt in prompts]

    def prefill(self, tree: TokenTree) -> Tensor:
        assert isinstance(tree, SharedTree)
        for start in range(0, tree.committed, PREFILL_CHUNK):
            chunk = tree.prompt[start : start + PREFILL_CHUNK]
            positions = range(start, start + len(chunk))
            with self.model.exclusive():
                passed = self.forward([Segment(tree.store, start, chunk, positions, start)], None)
            tree.forward_passes += 1
        tree.used = tree.committed
        return passed.logits[-1].float()

    def step(self, requests: Sequence[tuple[TokenTree, Sequence[Path]]]) -> list[StepOutput]:
        most = self.forward.max_sequences or len(requests)
        outputs: list[StepOutput] = []
        for first in range(0, len(requests), most):
            outputs += self._step(requests[first : first + most])
        return outputs

    def _step(self, requests: Sequence[tuple[TokenTree, Sequence[Path]]]) -> list[StepOutput]:
        trees: list[SharedTree] = [tree for tree, _ in requests]  # type: ignore[misc]
        segments = [tree.segment(paths) for tree, (_, paths) in zip(trees, requests, strict=True)]
        with self.model.exclusive():
            passed = self.forward(segments, trees[0].wanted)
        assert passed.hidden is not None
        logits = passed.logits.float()
        outputs, start = [], 0
        for tree, (_, paths) in zip(trees, requests, strict=True):
            tree.fed(paths)
            end = start + len(paths)
            outputs.append(StepOutput(logits[start:end], passed.hidden[:, start:end]))
            start = end
        return outputs
