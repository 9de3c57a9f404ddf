"""DoLa, DeCoRe and Diver: the engine's decode and scores are those of naive programs made from the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.errors import ConfigError, PromptError, UnsupportedModelError
from cocoa_engine.head_detection import find_retrieval_heads
from cocoa_engine.heads import RetrievalHeads, ScoredHead, masked_heads
from cocoa_engine.methods.dola import early_layers
from tests.alike import assert_alike
from tests.prompts import PROMPTS
from tests.reference import FullForward, Reference, assert_same
from tests.rivals_reference import DecoreReference, DiverReference, DolaReference
from tests.tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

NEAR = 2e-4
"""Decisions nearer than this may fall either way in float32."""

RIVALS = ("dola", "decore", "diver")


def heads_file(folder: Path, num_layers: int, num_heads: int, heads: list[tuple[int, int]]) -> str:
    scored = [ScoredHead(layer=layer, head=head, score=0.5) for layer, head in heads]
    found = RetrievalHeads(model_name="m", num_layers=num_layers, num_heads=num_heads, samples=1, heads=scored)
    path = folder / f"heads-{num_layers}-{num_heads}.json"
    path.write_text(found.model_dump_json())
    return str(path)


def heads_of(model: Any) -> list[tuple[int, int]]:
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    return [(layer, (layer * 2 + 1) % heads) for layer in range(0, layers, 2)]


def config_of(method: str, model: Any, folder: Path, **settings: Any) -> CocoaConfig:
    if method == "decore":
        heads = heads_of(model)
        file = heads_file(folder, model.config.num_hidden_layers, model.config.num_attention_heads, heads)
        settings = {"decore_heads": file, "decore_masked_heads": len(heads), **settings}
    return CocoaConfig(method=method, **settings)


def reference_of(method: str, forward: FullForward, tokenizer: Any, config: CocoaConfig) -> Reference:
    kind = {"dola": DolaReference, "decore": DecoreReference, "diver": DiverReference}[method]
    reference = kind(forward, tokenizer, config)
    if isinstance(reference, DolaReference):
        tied = bool(forward.model.config.tie_word_embeddings)
        reference.layers = early_layers(config.dola_layers, forward.num_layers, tied)
    if isinstance(reference, DecoreReference):
        reference.heads = heads_of(forward.model)
    return reference


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(20, VOCAB_SIZE, (3 + 4 * n,), generator=generator).tolist() for n in range(count)]


@pytest.mark.parametrize("method", RIVALS)
@pytest.mark.parametrize("forward", ["auto", "modules"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_tiny_models_decode_as_the_formula_says(architecture: str, forward: Any, method: str, tmp_path: Path) -> None:
    model, tokenizer = tiny_model(architecture, seed=1), tiny_tokenizer()
    full = FullForward(model)
    checked = 0
    for settings in ({}, {"final_layer": "pre_norm", "span_log_prob": "mean", "metric": "con_mlds"}):
        config = config_of(method, model, tmp_path, max_new_tokens=12, max_span_tokens=4, **settings)
        engine = CocoaEngine(model, tokenizer, runtime=Runtime(forward=forward, prefix_cache_mb=0))
        reference = reference_of(method, full, tokenizer, config)
        for prompt in prompts(4):
            expected = reference.generate(prompt)
            answer = engine.generate(prompt, config=config)
            if expected.margin > NEAR:
                assert_same(answer, expected)
                checked += 1
    assert checked >= 3


@pytest.mark.parametrize("method", RIVALS)
def test_the_real_model_decodes_as_the_formula_says(engine: CocoaEngine, method: str, tmp_path: Path) -> None:
    full = FullForward(engine.model)
    config = config_of(method, engine.model, tmp_path, max_new_tokens=10, max_candidates=3, max_span_tokens=4)
    reference = reference_of(method, full, engine.tokenizer, config)
    checked = 0
    for name in ("question", "story"):
        prompt = engine.encode(PROMPTS[name])
        expected = reference.generate(prompt)
        answer = engine.generate(prompt, config=config)
        if expected.margin > NEAR:
            assert_same(answer, expected)
            checked += 1
        given = engine.encode(" a small town in the north.", add_special_tokens=False)
        assert_same(engine.score(prompt, given, config=config), reference.score(prompt, given))
    assert checked


@pytest.mark.parametrize("method", RIVALS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_given_texts_score_as_the_formula_says(architecture: str, method: str, tmp_path: Path) -> None:
    model, tokenizer = tiny_model(architecture, seed=2), tiny_tokenizer()
    config = config_of(method, model, tmp_path)
    engine, reference = CocoaEngine(model, tokenizer), reference_of(method, FullForward(model), tokenizer, config)
    longer, *texts = prompts(4)
    for prompt in ([7], longer):  # also one of a single token, of which nothing is read beforehand
        together = engine.score(prompt, texts, config=config)
        for text, one in zip(texts, together, strict=True):
            assert_same(one, reference.score(prompt, text))
            assert_alike(engine.score(prompt, text, config=config), one)


@pytest.mark.parametrize("method", RIVALS)
def test_streams_and_batches_are_the_same(method: str, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    config = config_of(method, model, tmp_path, max_new_tokens=14, max_span_tokens=4)
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    asked = [[9], *prompts(4)]
    alone = [engine.generate(prompt, config=config) for prompt in asked]
    for one, other in zip(alone, engine.generate_batch(asked, config=config), strict=True):
        assert_alike(other, one)
    with engine.stream(asked[2], config=config) as stream:
        spans = list(stream)
    assert [span.token_ids for span in spans] == [span.token_ids for span in alone[2].spans]
    drafts = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(draft_tokens=0, prefix_cache_mb=0))
    assert_alike(drafts.generate(asked[3], config=config), alone[3])


@pytest.mark.parametrize("architecture", ["mamba", "qwen3_next"])
def test_slower_ways(architecture: str, tmp_path: Path) -> None:
    """DoLa runs on any model; the others say what they need."""
    model, tokenizer = tiny_model(architecture), tiny_tokenizer()
    engine = CocoaEngine(model, tokenizer)
    config = CocoaConfig(method="dola", max_new_tokens=8, dola_layers="0,1", repetition_penalty=1.0)
    assert len(engine.generate(prompts(2)[1], config=config).token_ids) <= 8
    with pytest.raises(UnsupportedModelError, match="share one cache"):
        engine.generate(prompts(1)[0], method="diver")
    if architecture == "qwen3_next":
        with pytest.raises(UnsupportedModelError, match="masks attention heads"):
            engine.generate(prompts(1)[0], config=config_of("decore", model, tmp_path))


def test_layers_of_dola() -> None:
    assert early_layers("high", 30, True) == tuple(range(15, 30, 2))
    assert early_layers("low", 30, True) == tuple(range(2, 15, 2))
    assert early_layers("low", 32, False) == tuple(range(0, 16, 2))
    assert early_layers("high", 80, False) == tuple(range(60, 80, 2))
    assert early_layers("low", 80, False) == tuple(range(0, 20, 2))
    assert early_layers("5,3,3", 8, True) == (3, 5)
    with pytest.raises(ValueError, match="0 to 7"):
        early_layers("8", 8, True)


def test_bad_settings(engine: CocoaEngine, tmp_path: Path) -> None:
    tiny = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(ConfigError, match="cocoa heads"):
        tiny.generate("Hello", method="decore")
    with pytest.raises(ConfigError, match="cannot be read"):
        engine.generate("Hello", method="decore", decore_heads=str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="no file of `cocoa heads`"):
        engine.generate("Hello", method="decore", decore_heads=str(tmp_path / "bad.json"))
    with pytest.raises(ConfigError, match="4 layers of 4"):
        engine.generate("Hello", method="decore", decore_heads=heads_file(tmp_path, 4, 4, [(0, 0)]))
    with pytest.raises(ConfigError, match="dola_layers"):
        engine.generate("Hello", method="dola", dola_layers="16,99")
    with pytest.raises(ConfigError, match="dola_layers"):
        CocoaConfig(dola_layers="top")
    assert CocoaConfig(dola_layers=(16, 18)).dola_layers == "16,18"  # type: ignore[arg-type]
    window = engine.context_window
    assert window is not None
    with pytest.raises(PromptError, match="reads it twice"):
        engine.generate([5] * (window // 2), method="diver")


def test_heads_that_copy_are_found(engine: CocoaEngine) -> None:
    """On the real model: the best heads copy much of what was found again, most heads nothing."""
    found = find_retrieval_heads(engine, lengths=(64,), depths=(0.5,))
    assert found.samples >= 1
    assert len(found.heads) == found.num_layers * found.num_heads == 270
    scores = [head.score for head in found.heads]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.3 > 0.05 > scores[len(scores) // 2]
    assert len(found.best(None)) == 13
    # those that come with the package were found in longer texts: the best are the same
    assert set(masked_heads(None, 5, 30, 9)) & set(found.best(5))
    answer = engine.generate("The capital of France is", method="decore", max_new_tokens=4)
    assert answer.spans


class Forbids:
    """Forbids all tokens but some, in place."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = list(allowed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = scores[:, self.allowed].clone()
        scores[:] = -torch.inf
        scores[:, self.allowed] = kept + 1000
        return scores


@pytest.mark.parametrize("method", ["dola", "decore"])
def test_processors_choose_and_do_not_score(method: str, tmp_path: Path) -> None:
    """Also where they leave none of the plausible tokens, and where they write into what they are given."""
    model = tiny_model("llama", seed=4)
    engine = CocoaEngine(model, tiny_tokenizer())
    config = config_of(method, model, tmp_path, max_new_tokens=6, dola_relative_top=1.0)
    answer = engine.generate(prompts(1)[0], config=config, logits_processor=[Forbids(40, 41)])
    assert set(answer.token_ids) <= {40, 41}
    assert all(abs(span.score) < 500 for span in answer.spans)
    scored = engine.score(prompts(1)[0], answer.token_ids, config=config)
    assert sum(span.score for span in answer.spans) == pytest.approx(scored.spans[0].score, abs=1e-3)


@pytest.mark.parametrize("method", RIVALS)
def test_a_caller_in_inference_mode(method: str, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=5)
    engine = CocoaEngine(model, tiny_tokenizer())
    config = config_of(method, model, tmp_path, max_new_tokens=8, max_span_tokens=4)
    long = [*prompts(1)[0]] * 30
    expected = CocoaEngine(model, tiny_tokenizer()).generate(long, config=config)
    with torch.inference_mode():
        for _ in range(2):  # the second time with the prompt's keys and values from the first
            assert_alike(engine.generate(long, config=config), expected)


def test_models_that_a_method_does_not_fit(tmp_path: Path) -> None:
    narrow = CocoaEngine(tiny_model("opt", word_embed_proj_dim=16), tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="width 32"):
        narrow.generate(prompts(1)[0], method="dola", dola_layers="2", final_layer="pre_norm", max_new_tokens=2)
    half = CocoaEngine(tiny_model("mamba").to(torch.bfloat16), tiny_tokenizer())
    assert half.generate(prompts(1)[0], method="dola", dola_layers="1", max_new_tokens=2).token_ids
    with pytest.raises(UnsupportedModelError, match="no attention heads"):
        half.generate(prompts(1)[0], method="decore", decore_heads=heads_file(tmp_path, 6, 4, [(0, 0)]))
    tiny = CocoaEngine(tiny_model("gpt2"), tiny_tokenizer())
    with pytest.raises(PromptError, match="reads twice"):
        tiny.score([5] * 256, [6], method="diver")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(
        '{"model_name":"m","num_layers":6,"num_heads":4,"samples":1,"heads":[{"layer":0,"head":9,"score":1}]}'
    )
    with pytest.raises(ConfigError, match="a head beyond"):
        tiny.generate([5], method="decore", decore_heads=str(wrong))


def test_usage_counts_what_follows_the_prompt(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=6)
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(draft_tokens=0, prefix_cache_mb=0))
    answer = engine.generate(prompts(1)[0], method="dola", max_new_tokens=5, repetition_penalty=1.0, dola_layers="1,2")
    assert answer.usage.fed_tokens == len(answer.token_ids)


@pytest.mark.parametrize("forward", ["auto", "modules"])
@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma3_text"])
def test_diver_reads_a_prompt_of_several_pieces(architecture: str, forward: Any) -> None:
    model, tokenizer = tiny_model(architecture, seed=1), tiny_tokenizer()
    engine = CocoaEngine(model, tokenizer, runtime=Runtime(forward=forward))
    config = CocoaConfig(method="diver", max_new_tokens=6, max_span_tokens=3)
    reference = DiverReference(FullForward(model), tokenizer, config)
    long = torch.randint(20, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(7)).tolist()
    expected = reference.generate(long)
    assert expected.margin > NEAR
    answer = engine.generate(long, config=config)
    assert answer.usage.risk_points
    assert_same(answer, expected)
