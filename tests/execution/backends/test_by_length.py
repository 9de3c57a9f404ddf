"""Positions beyond the length that a model was trained on: every rope type of transformers, on every backend."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import PromptError
from cocoa_engine.execution.backends import KINDS
from cocoa_engine.execution.forward import trial
from cocoa_engine.model import gguf_model
from cocoa_engine.model.configs import context_window_of
from cocoa_engine.model.gguf_reader import GgufFile
from tests.helpers.alike import assert_all_alike
from tests.helpers.backends import WANTED, close_to, made, plain
from tests.helpers.family_gguf import write_family
from tests.helpers.inside import use_backend
from tests.helpers.tiny_models import EOS, tiny_model, tiny_tokenizer

ORIGINAL, TOKENS = 32, 10
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"original_max_position_embeddings": ORIGINAL, **LONG},
    "llama3": {**LLAMA_3, "factor": 8.0, "original_max_position_embeddings": ORIGINAL // 2},
    "proportional": {"factor": 4.0, "partial_rotary_factor": 0.5},
}
WINDOWS = {"longrope": ORIGINAL * 4, "llama3": ORIGINAL * 4}  # stated by the config, not by the factor


def scaled(kind: str, architecture: str = "llama") -> PreTrainedModel:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind]}
    options = {"original_max_position_embeddings": ORIGINAL} if architecture == "phi3" else {}
    window = WINDOWS.get(kind, ORIGINAL)
    model = tiny_model(architecture, rope_parameters=rope, max_position_embeddings=window, **options)
    model.generation_config.min_new_tokens = TOKENS  # type: ignore[union-attr]
    return model


def whole(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """What a model that has seen no other sequence gives after these tokens, in one pass. It stays so."""
    logits = plain(copy.deepcopy(model), ids)
    logits[EOS] = -torch.inf  # no answer ends
    return logits.log_softmax(-1)


def test_the_window_counts_the_scaling_of_every_type_of_transformers() -> None:
    assert ROPES.keys() == ROPE_INIT_FUNCTIONS.keys()
    ids = [3 + number % 200 for number in range(ORIGINAL * 4 - 2)]
    for kind in ROPES:
        engine = CocoaEngine(scaled(kind), tiny_tokenizer())
        assert engine.context_window == ORIGINAL * 4
        assert len(engine.generate(ids, max_new_tokens=2, method="greedy").token_ids) == 2
        with pytest.raises(PromptError, match=str(ORIGINAL * 4)):
            engine.generate([*ids, 4, 5, 6], max_new_tokens=2)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA_3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("qwen2", {"rope_scaling": YARN}, 256),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
        ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 256}, 256),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 2}}, 128),
        ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 1.5}}, 96),
        ("qwen2", {"rope_scaling": None}, 64),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 0.5}}, 64),
        ("llama", {"rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 16}}, 64),
        ("gemma3_text", {"rope_parameters": GEMMA_3}, 64),
    ],
)
def test_windows_of_configs_as_they_are_published(architecture: str, fields: dict[str, Any], expected: int) -> None:
    config = AutoConfig.for_model(architecture, **{"max_position_embeddings": 64, **fields})
    assert context_window_of(config) == expected


def test_the_window_of_a_file_is_that_of_its_model(tmp_path: Path) -> None:
    for family in ("mistral", "gemma3", "phi3-long"):
        write_family(tmp_path / "model.gguf", family, "F32")
        file = GgufFile(tmp_path / "model.gguf")
        assert gguf_model.context_window(file) == context_window_of(gguf_model.load(file).config) == 128


CACHES = [kind for kind in KINDS if kind not in ("static_lean", "lean")]
BY_LENGTH = [("longrope", "llama"), ("longrope", "phi3"), ("dynamic", "llama")]


def answers(model: PreTrainedModel, kind: str, *prompts: list[int], linears: Any = "stock", **settings: Any) -> Any:
    engine = use_backend(CocoaEngine(model, tiny_tokenizer()), made(model, kind, linears))
    return engine.generate_batch(list(prompts), max_new_tokens=TOKENS, **settings)


def prompt(length: int, seed: int = 7) -> list[int]:
    return [3 + seed * number % 200 for number in range(length)]


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("kind", "architecture"), BY_LENGTH)
@pytest.mark.parametrize("start", [ORIGINAL - 4, ORIGINAL])
def test_answers_cross_the_length_of_training(cache: str, kind: str, architecture: str, start: int) -> None:
    """Each token is that of a full pass over all tokens before it, whatever the model has seen since it was loaded."""
    model, ids = scaled(kind, architecture), prompt(start)
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        model(torch.tensor([prompt(100)]))
    (found,) = answers(model, cache, ids, method="greedy")
    log_probs = [value for span in found.spans for value in span.token_log_probs]
    for token_id, log_prob in zip(found.token_ids, log_probs, strict=True):
        expected = whole(fresh, ids)
        assert token_id == int(expected.argmax())
        assert log_prob == pytest.approx(float(expected[token_id]), abs=1e-4)
        ids.append(token_id)
    assert len(ids) == start + TOKENS
    if (cache, kind, architecture) == ("modules", "longrope", "llama") and start < ORIGINAL:
        # then the keys and values hold again
        (never,) = answers(model, cache, prompt(ORIGINAL + 4), method="greedy")
        assert found.usage.forward_passes <= never.usage.forward_passes + 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cocoa-sig", "dola"])
@pytest.mark.parametrize(("kind", "architecture"), BY_LENGTH)
def test_branches_cross_it_too(kind: str, architecture: str, method: str) -> None:
    """Beside other sequences, with tokens fed ahead: spans, candidates and figures are those of whole sequences."""
    prompts = [prompt(ORIGINAL - 5), prompt(10, 11), prompt(ORIGINAL + 9, 13)]
    expected = answers(scaled(kind, architecture), "recompute", *prompts, method=method)
    ways = [
        *((cache, "stock") for cache in CACHES[:-1]),
        *([("modules", "native")] if trial.obstacle() is None else []),
    ]
    for cache, linears in ways:
        found = answers(scaled(kind, architecture), cache, *prompts, linears=linears, method=method)
        assert_all_alike(found, expected)


def test_prompts_that_begin_alike_share_nothing_of_another_length() -> None:
    model = scaled("longrope")
    engine = CocoaEngine(model, tiny_tokenizer())
    long, short = prompt(120), prompt(120)[: ORIGINAL - 1]
    for ids in (short, long, short, long):
        found = engine.generate(ids, max_new_tokens=1, method="greedy")
        assert found.spans[0].token_log_probs[0] == pytest.approx(float(whole(model, ids).max()), abs=1e-4)


def test_a_branch_that_is_kept_over_the_crossing_goes_on() -> None:
    """The cache that is opened afterwards does not hold its tokens, which were fed as whole sequences."""
    model, ids = scaled("longrope"), prompt(ORIGINAL)
    backend = made(model, "modules", "stock").backend
    (tree,) = backend.open([ids], TOKENS, WANTED)
    backend.prefill(tree)
    backend.step([(tree, [(5,), (6,), (6, 7)])])
    tree.commit((6,), keep_rest=True)
    (output,) = backend.step([(tree, [(7, 8), (9,), (9, 10)])])
    for logits, path in zip(output.logits, ([7, 8], [9], [9, 10]), strict=True):
        close_to(logits, plain(copy.deepcopy(model), [*ids, 6, *path]))
