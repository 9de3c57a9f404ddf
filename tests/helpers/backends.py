"""Backends made by hand, and what plain forward passes give in their place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cocoa_engine.execution.backends import Chosen, Path, build
from cocoa_engine.execution.backends.shared_cache import SharedCache, SharedTree
from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.forward.linears import LinearBackend
from cocoa_engine.model.language_model import CaptureSpec, LanguageModel

PROMPTS = [[5, 9, 40, 77, 12, 150, 3], [200, 201], list(range(30, 60))]
WANTED = CaptureSpec(2, 4, "post_norm")
LINEAR_BACKENDS: list[LinearBackend] = ["native", "packed", "transposed", "stock"][trial.obstacle() is not None :]


def made(model: PreTrainedModel, kind: str, linear_backend: LinearBackend) -> Chosen:
    return Chosen(build(kind, LanguageModel(model), linear_backend), "set by the test", linear_backend)


def plain(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def close_to(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def shared(model: PreTrainedModel, kind: str = "lean", linear_backend: LinearBackend = "transposed") -> SharedCache:
    backend = build(kind, LanguageModel(model), linear_backend)
    assert isinstance(backend, SharedCache)
    return backend


def opened(
    backend: SharedCache, prompt: Sequence[int], reserve_tokens: int = 32, capture: CaptureSpec = WANTED
) -> SharedTree:
    (tree,) = backend.open([prompt], reserve_tokens, capture)
    backend.prefill(tree)
    return tree


def step(backend: SharedCache, tree: SharedTree, *paths: Path) -> None:
    """A step whose last row is that of a plain pass; its path is kept."""
    (output,) = backend.step([(tree, list(paths))])
    close_to(output.logits[-1], plain(backend.model.model, [*tree.token_ids, *paths[-1]]))
    tree.commit(paths[-1])
