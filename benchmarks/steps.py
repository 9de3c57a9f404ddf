"""Single forward passes after a prompt: the same one again and again, so that all cost the same."""

from __future__ import annotations

import torch

from benchmarks.measure import Bench
from benchmarks.prompts import long_prompt
from cocoa_engine import CocoaConfig, Runtime
from cocoa_engine.decoding.request import capture_spec
from cocoa_engine.execution.backends import choose
from cocoa_engine.execution.backends.shared_cache import SharedCache, SharedTree
from cocoa_engine.model.language_model import LanguageModel

MOST_TIPS = 8


class Steps:
    """A prompt that has been read, and passes over tokens that may follow it. Close it afterwards."""

    def __init__(self, bench: Bench, runtime: Runtime, prompt_tokens: int) -> None:
        model = LanguageModel(bench.loaded.model)
        backend = choose(model, runtime).backend
        if not isinstance(backend, SharedCache):
            raise SystemExit(f"steps are measured on models whose branches share a cache, not by {backend.name}")
        self._backend = backend
        self._capture = capture_spec(model, CocoaConfig())
        (tree,) = backend.open([long_prompt(bench.loaded, prompt_tokens)], MOST_TIPS, self._capture)
        assert isinstance(tree, SharedTree)
        self._tree = tree
        self._tokens = backend.prefill(tree).topk(MOST_TIPS).indices.tolist()

    def step(self, tips: int, *, capturing: bool) -> torch.Tensor | None:
        """One pass over so many next tokens; the states it captured, ``[layers, tips, d]``."""
        paths = [(token_id,) for token_id in self._tokens[:tips]]
        with self._backend.forward.exclusive():
            return self._backend.forward([self._tree.segment(paths)], self._capture if capturing else None).hidden

    def close(self) -> None:
        """Give the prompt's memory back."""
        self._tree.close()
