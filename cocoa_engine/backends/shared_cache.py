"""All branches of all sequences in one forward pass over one preallocated cache.

The live tips of a sequence's branches are fed as tokens of *one* row: explicit positions, and a mask by which a tip
sees the committed prefix and its own branch only. When a branch is kept its few slots are moved down to follow the
prefix, and the other branches' slots are free again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocoa_engine.backends.base import Backend, Path, StepOutput, TokenTree
from cocoa_engine.backends.cache import SlotCache
from cocoa_engine.backends.masks import Mask, MaskLayout
from cocoa_engine.hidden_states import Wanted, capture
from cocoa_engine.model import LanguageModel

PREFILL_CHUNK = 2048
"""Tokens of a prompt fed at once: what a long prompt needs beside its keys and values does not grow with it."""


class _Batch:
    """The rows of one cache. Rows in use are the first ones, so that a step reads them as one view."""

    def __init__(self, cache: SlotCache, wanted: Wanted, capacity: int) -> None:
        self.cache = cache
        self.wanted = wanted
        self.spare_slot = capacity - 1  # where the padding of a ragged step is written; never read
        self.trees: list[SharedTree] = []


class SharedTree(TokenTree):
    """One row of the shared cache."""

    def __init__(self, batch: _Batch, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self.batch = batch
        self.prompt = list(prompt)
        self.row = len(batch.trees)
        self.slots: dict[Path, list[int]] = {(): []}  # of each path since the last commit
        self.used = 0
        batch.trees.append(self)

    def allot(self, paths: Sequence[Path]) -> list[int]:
        """A slot for the last token of each path."""
        first = self.used
        for number, path in enumerate(paths):
            self.slots[path] = [*self.slots[path[:-1]], first + number]
        self.used += len(paths)
        return list(range(first, self.used))

    @torch.no_grad()
    def commit(self, path: Path) -> None:
        self.batch.cache.compact(self.row, self.slots[path], self.committed)
        self.committed += len(path)
        self.used = self.committed
        self.slots = {(): []}

    @torch.no_grad()
    def close(self) -> None:
        batch = self.batch
        if self not in batch.trees:
            return
        last = batch.trees.pop()
        if last is not self:  # keep the used rows together: the last row takes the freed place
            batch.cache.move_row(last.row, self.row, last.used)
            last.row = self.row
            batch.trees[self.row] = last


class SharedCache(Backend):
    """The fast backend, for attention-only models.

    Raises:
        NotImplementedError: the model has layers whose cache cannot hold branches.
    """

    name = "shared_cache"

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        if "position_ids" not in model.forward_parameters:
            raise NotImplementedError("the model takes no position_ids")
        self.masks = MaskLayout(model.config)

    def open(self, prompts: Sequence[Sequence[int]], room: int, wanted: Wanted) -> list[TokenTree]:
        capacity = max(map(len, prompts)) + room + 1
        batch = _Batch(SlotCache(self.model.num_layers, len(prompts), capacity), wanted, capacity)
        return [SharedTree(batch, prompt) for prompt in prompts]

    def prefill(self, tree: TokenTree) -> Tensor:
        assert isinstance(tree, SharedTree)
        cache, device = tree.batch.cache, self.model.device
        token_ids = torch.tensor([tree.prompt], device=device)
        for start in range(0, tree.committed, PREFILL_CHUNK):
            chunk = token_ids[:, start : start + PREFILL_CHUNK]
            width = chunk.shape[1]
            with self.model.exclusive():
                cache.plan.contiguous(tree.row, start, width)
                output = self.model.forward(
                    chunk,
                    logits_to_keep=1,
                    position_ids=torch.arange(start, start + width, device=device)[None],
                    past_key_values=cache,
                    use_cache=True,
                )
            tree.forward_passes += 1
        tree.used = tree.committed
        return output.logits[0, -1].float()

    def step(self, requests: Sequence[tuple[TokenTree, Sequence[Path]]]) -> list[StepOutput]:
        trees: list[SharedTree] = [tree for tree, _ in requests]  # type: ignore[misc]
        batch = trees[0].batch
        rows, width = len(batch.trees), max(len(paths) for _, paths in requests)
        token_ids = torch.zeros(rows, width, dtype=torch.long)
        positions = torch.zeros(rows, width, dtype=torch.long)
        slots = torch.full((rows, width), batch.spare_slot)
        alone = len(requests) == rows == width == 1 and trees[0].used == trees[0].committed
        for tree, (_, paths) in zip(trees, requests, strict=True):
            count = len(paths)
            slots[tree.row, :count] = torch.tensor(tree.allot(paths))
            token_ids[tree.row, :count] = torch.tensor([path[-1] for path in paths])
            positions[tree.row, :count] = torch.tensor([tree.committed + len(path) - 1 for path in paths])
            tree.forward_passes += 1
            tree.fed_tokens += count
        mask = None if alone else self._mask(trees, [paths for _, paths in requests], positions)

        model = self.model
        with model.exclusive(), capture(model, batch.wanted) as captured:
            if rows == 1:
                batch.cache.plan.contiguous(0, int(slots[0, 0]), width)
            else:
                batch.cache.plan.scattered(
                    slots, max(tree.committed for tree in batch.trees), max(tree.used for tree in batch.trees)
                )
            output = model.forward(
                token_ids.to(model.device),
                logits_to_keep=width,
                position_ids=positions.to(model.device),
                attention_mask=mask,
                past_key_values=batch.cache,
                use_cache=True,
            )
            logits = output.logits[:, -width:]  # [B, W, V]
            hidden = captured.stacked(logits.device)  # [N + 1, B, W, d]
        return [
            StepOutput(logits[tree.row, : len(paths)].float(), hidden[:, tree.row, : len(paths)])
            for tree, (_, paths) in zip(trees, requests, strict=True)
        ]

    def _mask(self, trees: Sequence[SharedTree], paths: Sequence[Sequence[Path]], positions: Tensor) -> Mask:
        batch = trees[0].batch
        rows, width = positions.shape
        end = max(tree.used for tree in batch.trees)
        visible = torch.zeros(rows, width, end, dtype=torch.bool)
        slot_positions = torch.arange(end).repeat(rows, 1)  # [B, S]
        visible[:, :, 0] = True  # so that padding has something to look at
        for tree, own in zip(trees, paths, strict=True):
            visible[tree.row, : len(own), : tree.committed] = True
            for tip, path in enumerate(own):
                visible[tree.row, tip, tree.slots[path]] = True
            for path, path_slots in tree.slots.items():
                if path:
                    slot_positions[tree.row, path_slots[-1]] = tree.committed + len(path) - 1
        distance = positions[:, :, None] - slot_positions[:, None, :]  # [B, W, S]
        return self.masks.additive(visible, distance, self.model.dtype, self.model.device)
