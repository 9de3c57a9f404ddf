"""All layers in one call of our kernels: what the written-out pass computes, and when it steps in instead."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from cocoa_engine.execution.backends import FeedRequest
from cocoa_engine.execution.backends.shared_cache import SharedCache
from cocoa_engine.execution.forward.kernel_layers import MAX_ROWS, KernelLayers
from cocoa_engine.execution.forward.lean import Lean
from cocoa_engine.execution.forward.linears import LinearBackend
from cocoa_engine.model.language_model import CaptureSpec
from tests.helpers.backends import close_to, opened, shared
from tests.helpers.in_threads import threads
from tests.helpers.libraries import needs_kernels
from tests.helpers.tiny_models import NUM_LAYERS, tiny_model

pytestmark = needs_kernels

PROMPTS = [[5, 9, 40, 77, 12, 150, 3, 8, 21, 60], [200, 201]]
STEPS: list[list[list[tuple[int, ...]]]] = [  # of either sequence: the paths of one step, and the one that is kept
    [[(7,), (8,), (9,)], [(4,)]],
    [[(7, 1), (9, 2), (9, 2, 3)], [(4, 5), (4, 6)]],
]
KEPT = [(9, 2, 3), (4, 6)]
WANTED = {
    "middle": CaptureSpec(2, 4, "post_norm"),
    "to the last, before the norm": CaptureSpec(0, NUM_LAYERS, "pre_norm"),
    "to the last, after the norm": CaptureSpec(3, NUM_LAYERS, "post_norm"),
    "early layers": CaptureSpec(2, 3, "post_norm", early=(4, 1)),
}


by_kernels = partial(shared, kind="lean", linear_backend="native")


def lean(backend: SharedCache) -> Lean:
    assert isinstance(backend.forward, Lean)
    return backend.forward


def outputs(backend: SharedCache, capture: CaptureSpec) -> list[torch.Tensor]:
    """Two sequences in shared passes, a branch of each kept, and one more step on what was kept."""
    trees = [opened(backend, prompt, 16, capture) for prompt in PROMPTS]
    found: list[torch.Tensor] = []

    def step(asked: Sequence[FeedRequest]) -> None:
        for output in backend.step(list(zip(trees, asked, strict=True))):
            found.extend((output.logits, output.hidden, *([] if output.others is None else [output.others])))

    for asked in STEPS:
        step(asked)
    for tree, kept in zip(trees, KEPT, strict=True):
        tree.commit(kept)
    step([[(11,), (12,)], [(13,)]])
    for tree in trees:
        tree.close()
    return found


KINDS = ["full_attention", "sliding_attention"] * (NUM_LAYERS // 2)
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": KINDS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options", "linears"),
    [
        *((name, {}, "native") for name in ("llama", "mistral-sliding", "phi3", "qwen2", "qwen3")),
        ("qwen2", SOME_WINDOWS, "native"),
        ("llama", {}, "bfloat16"),
    ],
)
def test_the_same_as_the_written_out_pass(
    architecture: str, options: dict[str, Any], linears: LinearBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, run = [], KernelLayers.__call__
    monkeypatch.setattr(KernelLayers, "__call__", lambda *args: (calls.append(args), run(*args))[1])
    model = tiny_model(architecture, **options)
    for capture in WANTED.values():
        calls.clear()
        backend = shared(model, "lean", linears)
        found = outputs(backend, capture)
        assert len(calls) == 3
        lean(backend).kernels = None
        for one, other in zip(found, outputs(backend, capture), strict=True):
            close_to(one, other)
        assert len(calls) == 3


def test_layers_of_several_widths_go_the_other_way() -> None:
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(32, 24, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(24, 32, bias=False)
    backend = by_kernels(model.eval())
    assert lean(backend).kernels is None
    assert all(torch.isfinite(tensor).all() for tensor in outputs(backend, WANTED["middle"]))


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_is_the_same_to_the_bit_whatever_is_fed_with_it(count: int) -> None:
    with threads(count):
        backend = by_kernels(tiny_model("llama"))
        first, alone, pair = (opened(backend, PROMPTS[0], 64) for _ in range(3))
        paths = [(token,) for token in range(20, 40)]
        (together,) = backend.step([(first, paths)])
        assert torch.equal(backend.step([(alone, paths)])[0].logits, together.logits)
        beside, again = backend.step([(alone, [(50,)]), (pair, paths)])
        assert torch.equal(again.logits, together.logits)
        assert torch.equal(again.hidden, together.hidden)
        assert beside.logits.shape == (1, together.logits.shape[1])


def test_many_tokens_go_the_other_way() -> None:
    backend = by_kernels(tiny_model("llama"))
    kernels, tree = lean(backend).kernels, opened(backend, PROMPTS[0], 2 * MAX_ROWS)
    assert kernels is not None
    paths = [(token,) for token in range(20, 21 + MAX_ROWS)]
    assert kernels.leaves([tree.segment(paths[:-1])]) is not None
    assert kernels.leaves([tree.segment(paths)]) is None


def test_a_store_that_grew_is_found_again() -> None:
    backend = by_kernels(tiny_model("llama"))
    tree = opened(backend, PROMPTS[0], 1)
    backend.step([(tree, [(7,)])])
    known = tree.store.pointers
    assert known is not None
    tree.store.reserve(4 * tree.store.capacity)
    assert tree.store.pointers is None
    backend.step([(tree, [(8,)])])
    assert tree.store.pointers not in (None, known)
