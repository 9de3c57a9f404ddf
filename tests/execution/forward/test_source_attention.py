"""Source attention equals what eager attention weights say, in every backend that sees the model's attention."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cocoa_engine import CocoaConfig, CocoaEngine, Generation
from cocoa_engine.execution.forward.source_attention import SourceProbe, observer
from cocoa_engine.methods.retrieval_heads import SOURCE_HEADS, known_heads, source_heads
from cocoa_engine.model.language_model import LanguageModel
from tests.helpers.alike import near
from tests.helpers.attention import attention_weights, mass_on_prompt, source_attention
from tests.helpers.backends import PROMPTS, made
from tests.helpers.in_threads import join, start
from tests.helpers.inside import use_backend
from tests.helpers.libraries import needs_kernels
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

SEEN = ["llama", "mistral-sliding", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "gpt2"]
PROMPT = PROMPTS[2]


def config_of(model: PreTrainedModel, folder: Path) -> CocoaConfig:
    size = model.config.num_hidden_layers, model.config.num_attention_heads
    return CocoaConfig(decore_heads=heads_file(folder, *size, heads_of(model)), max_new_tokens=12, gamma=0.2)


def eager(model: PreTrainedModel, token_ids: list[int], prompt_tokens: int) -> list[float]:
    """The mean mass of the heads on the prompt after its first token, for each token after the prompt."""
    return mass_on_prompt(attention_weights(model, token_ids), heads_of(model), prompt_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SEEN)
def test_it_is_the_mass_of_the_attention_weights(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer(), config=config_of(model, tmp_path))
    answer = engine.generate(PROMPT)
    assert any(span.candidates for span in answer.spans)
    expected = eager(model, [*PROMPT, *answer.token_ids], len(PROMPT))
    assert source_attention(answer) == near(expected)
    assert 0 <= min(expected) < max(expected) <= 1  # 0 where a window has left the prompt
    for span in answer.spans:
        mean = sum(span.token_source_attention) / len(span.token_ids)
        assert span.source_attention == pytest.approx(mean)
        if span.chosen is not None and (kept := span.candidates[span.chosen]).token_ids == span.token_ids:
            assert kept.source_attention == span.source_attention


OWN_ATTENTION = ["llama", "mistral-sliding", "gemma2", "gemma3_text"]
WAYS = [
    *(
        ("mistral-sliding", kind, linears)
        for kind in ("static_lean", "lean", "modules")
        for linears in ("stock", "transposed")
    ),
    *(
        pytest.param("mistral-sliding", kind, "native", marks=needs_kernels)
        for kind in ("static_lean", "lean", "modules")
    ),
    # a cache of a sliding layer has dropped the first keys of the longer prompts
    *((name, kind, "stock") for kind in ("masked_modules", "copied_cache", "recompute") for name in OWN_ATTENTION),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "linear_backend"), WAYS)
def test_every_backend_measures_the_same(architecture: str, kind: str, linear_backend: Any, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    engine = use_backend(
        CocoaEngine(model, tiny_tokenizer(), config=config_of(model, tmp_path)), made(model, kind, linear_backend)
    )
    usual = model.config._attn_implementation
    for prompt, answer in zip(PROMPTS, engine.generate_batch(PROMPTS), strict=True):
        assert source_attention(answer) == near(eager(model, [*prompt, *answer.token_ids], len(prompt)))
    assert model.config._attn_implementation == usual
    alone = engine.generate(PROMPT)
    assert source_attention(alone) == near(eager(model, [*PROMPT, *alone.token_ids], len(PROMPT)))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SEEN)
def test_given_texts(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer(), config=config_of(model, tmp_path))
    text = [9, 40, 77, 12, 150, 3, 200]
    expected = eager(model, [*PROMPT, *text], len(PROMPT))
    usual = model.config._attn_implementation
    assert source_attention(engine.score(PROMPT, text)) == near(expected)
    assert model.config._attn_implementation == usual
    one, two = engine.score(PROMPT, [text, text[:3]])
    assert source_attention(one) == near(expected)
    assert source_attention(two) == near(expected[:3])


@pytest.mark.parametrize("method", ["greedy", "decore", "dola", "diver"])
def test_other_methods(method: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer(), config=config_of(model, tmp_path))
    answer = engine.generate(PROMPT, method=method)
    contrasts = method in ("decore", "dola")  # the prompt's last token is fed as a step, and is not in the source
    expected = eager(model, [*PROMPT, *answer.token_ids], len(PROMPT))
    found = source_attention(answer)
    assert len(found) == len(answer.token_ids)
    if not contrasts:
        assert found == near(expected)
    assert all(value <= more + 1e-4 for value, more in zip(found, expected, strict=True))


def test_the_best_heads_of_the_embedded_model() -> None:
    embedded = known_heads(None, 30, 9)
    assert embedded is not None
    assert len(set(embedded.best(SOURCE_HEADS))) == SOURCE_HEADS
    assert source_heads(None, LanguageModel(tiny_model("llama"))) != ()  # those that spread_heads takes


def test_heads_that_are_divided_among_processes_are_not_measured(tmp_path: Path) -> None:
    model = tiny_model("llama")
    file = config_of(model, tmp_path).decore_heads
    assert source_heads(file, LanguageModel(model)) == tuple(heads_of(model))
    model.lm_head.weight.device_mesh = object()
    assert source_heads(file, LanguageModel(model)) == ()


@needs_kernels
def test_methods_that_read_the_prompt_back_share_passes_with_others(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = config_of(model, tmp_path)
    engine = use_backend(CocoaEngine(model, tiny_tokenizer(), config=config), made(model, "lean", "native"))
    alone = engine.generate(PROMPT)
    outcome: list[Generation] = []
    other = start(lambda: [engine.generate(PROMPTS[0], method="diver") for _ in range(3)])
    for _ in range(3):
        outcome.append(engine.generate(PROMPT))
    join([other])
    for answer in outcome:
        assert source_attention(answer) == near(source_attention(alone))
        assert all(len(span.token_source_attention) == len(span.token_ids) for span in answer.spans)


def observe(
    probe: SourceProbe,
    length: int,
    layer: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    mask: Any = None,
    **options: Any,
) -> None:
    """Observe the last two rows of a layer."""
    module: Any = SimpleNamespace(layer_idx=layer)
    observer(probe, 2, length)(lambda *_, **__: None, module, query, keys, keys, mask, **options)


def test_layers_of_a_model_may_lie_on_several_devices() -> None:
    """The mask of a layer has its dtype."""
    probe = SourceProbe([(0, 0), (1, 0)], range(1, 4))
    torch.manual_seed(0)
    for layer, dtype in enumerate((torch.float32, torch.bfloat16)):
        observe(probe, 6, layer, torch.randn(1, 4, 6, 8, dtype=dtype), torch.randn(1, 2, 6, 8, dtype=dtype))
    found = probe.means()
    assert found is not None
    assert found.shape == (2, 1)
    assert found.isfinite().all()


def test_masks_sinks_and_dropped_keys() -> None:
    """The cache of the layer has dropped the first 3 of 13 keys; the mask of each head is its own."""
    torch.manual_seed(0)
    query, keys, sinks = torch.randn(4, 2, 8), torch.randn(2, 10, 8), torch.randn(4)
    sees = torch.rand(4, 2, 10) < 0.7
    sees[..., 0] = True
    biases = torch.randn(4, 2, 10)
    seen = torch.where(sees, 0.0, -torch.inf)
    for mask, bias, added in ((sees, None, seen), (biases, None, biases), (sees, biases, seen + biases)):
        probe = SourceProbe([(0, 0), (0, 3), (0, 7), (1, 0)], range(1, 6), [range(2), range(4, 6)])
        biased = {} if bias is None else {"position_bias": bias[None]}
        observe(probe, 13, 0, query[None], keys[None], mask[None], scaling=0.4, s_aux=sinks, **biased)
        masses = []
        for head in (0, 3):  # there is no head 7, and no layer 1
            scores = query[head] @ keys[head // 2].T * 0.4 + added[head]
            weights = torch.cat([scores, sinks[head].expand(2, 1)], dim=-1).softmax(-1)
            masses.append(torch.stack([weights[:, :3].sum(-1), torch.zeros(2), weights[:, 1:3].sum(-1)]))
        found = probe.means()
        assert found is not None
        torch.testing.assert_close(found, torch.stack(masses).mean(dim=0).T)


def test_a_prompt_of_one_token_has_no_source(tmp_path: Path) -> None:
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer(), config=config_of(model, tmp_path))
    short, long = engine.generate_batch([[5], PROMPT])
    assert source_attention(short) == source_attention(engine.generate([5])) == []
    assert source_attention(engine.score([5], [6, 7])) == []
    assert source_attention(long) == near(source_attention(engine.generate(PROMPT)))
