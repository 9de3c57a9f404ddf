"""A backend that copies the model's own cache for each branch. It is slower, but works with any copyable cache."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cocoa_engine.execution.backends.base import Backend, FeedRequest, Path, StepOutput, TokenTree, only_paths
from cocoa_engine.execution.forward.observed_attention import observed_attention
from cocoa_engine.execution.forward.source_attention import of_segments, probe_of
from cocoa_engine.model.hidden_states import CaptureSpec, capture
from cocoa_engine.model.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import Cache

_CACHE_NAMES = ("past_key_values", "cache_params", "state")


class CopiedTree(TokenTree):
    """One sequence, with a cache for each live path."""

    def __init__(self, prompt: Sequence[int], capture: CaptureSpec) -> None:
        super().__init__(prompt)
        self.prompt = list(prompt)
        self.capture = capture
        self.caches: dict[Path, Cache | None] = {(): None}

    def commit(self, path: Path, *, keep_rest: bool = False) -> None:
        self.committed += len(path)
        self.caches = {(): self.caches[path]}

    def close(self) -> None:
        self.caches = {}


class CopiedCache(Backend[CopiedTree]):
    """Copies the cache for each branch. For models with recurrent state (Mamba, hybrids), ALiBi or chunked attention.

    Raises:
        NotImplementedError: the model has no cache to copy.
    """

    name = "copied_cache"
    paths_per_step = 16  # each path may need its own cache

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.cache_name = next((name for name in _CACHE_NAMES if name in model.forward_parameters), "")
        if not self.cache_name:
            raise NotImplementedError("the model takes no cache")

    def open(self, prompts: Sequence[Sequence[int]], reserve_tokens: int, capture: CaptureSpec) -> list[CopiedTree]:
        return [CopiedTree(prompt, capture) for prompt in prompts]

    def prefill_some(self, tree: CopiedTree, max_tokens: int | None = None) -> Tensor:
        with self.model.exclusive():
            output = self._forward(tree.prompt, 0, None)
        tree.caches = {(): getattr(output, self.cache_name)}
        tree.forward_passes += 1
        return output.logits[0, -1].float()

    def step(self, requests: Sequence[tuple[CopiedTree, FeedRequest]]) -> list[StepOutput]:
        return [self._step(tree, only_paths(asked)) for tree, asked in requests]

    def _step(self, tree: CopiedTree, paths: Sequence[Path]) -> StepOutput:
        children = Counter(path[:-1] for path in paths)
        logits, hidden, others = [], [], []
        probes = [probe_of(tree.capture.source_heads, tree.prompt_tokens, tree.passages) for _ in paths]
        for path, probe in zip(paths, probes, strict=True):
            parent = path[:-1]
            children[parent] -= 1
            # the last child takes over its parent's cache, because only one step may extend a path
            shared = children[parent] or (tree.keep_committed and not parent)
            cache = copy.deepcopy(tree.caches[parent]) if shared else tree.caches.pop(parent)
            length = tree.committed + len(path)
            with (
                self.model.exclusive(),
                capture(self.model, tree.capture) as captured,
                observed_attention(self.model, probe, 1, length),
            ):
                output = self._forward([path[-1]], length - 1, cache)
                logits.append(output.logits[0, -1].float())
                hidden.append(captured.stacked(logits[-1].device)[:, 0, -1])
                if (early := captured.early_logits(self.model, logits[-1].device)) is not None:
                    others.append(early[:, 0, -1])
            tree.caches[path] = getattr(output, self.cache_name)
            tree.forward_passes += 1
            tree.fed_tokens += 1
        early_logits = torch.stack(others, dim=1) if others else None
        return StepOutput(
            torch.stack(logits),
            torch.stack(hidden, dim=1),
            early_logits,
            *of_segments([(probe, 1) for probe in probes]),
        )

    def _forward(self, token_ids: Sequence[int], start: int, cache: Cache | None) -> Any:
        device = self.model.device
        return self.model.forward(
            torch.tensor([token_ids], device=device),
            logits_to_keep=1,
            position_ids=torch.arange(start, start + len(token_ids), device=device)[None],
            use_cache=True,
            **({self.cache_name: cache} if cache is not None else {}),
        )
