"""``max_new_tokens`` cuts an answer and changes none of its tokens; the context window is a hard bound."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, Generation, Runtime
from tests.helpers.alike import near
from tests.helpers.forward_passes import record, steps
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

METHODS = ("greedy", "cocoa", "cocoa-sig", "diver", "dola", "decore")
LONGEST = 20


@cache
def engine_of(architecture: str) -> CocoaEngine:
    return CocoaEngine(tiny_model(architecture, seed=1), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(11)
    return [[dice.randrange(20, VOCAB_SIZE) for _ in range(3 + 5 * number)] for number in range(count)]


def assert_cut(short: Generation, whole: Generation, most: int) -> None:
    """The short answer is the beginning of the whole one, and its own statistics are those of its tokens."""
    assert short.token_ids == whole.token_ids[:most]
    assert short.finish_reason == ("length" if most < len(whole.token_ids) else whole.finish_reason)
    log_probs = [log_prob for span in short.spans for log_prob in span.token_log_probs]
    assert log_probs == pytest.approx(
        [log_prob for span in whole.spans for log_prob in span.token_log_probs][:most], abs=1e-3
    )
    for span, uncut in zip(short.spans, whole.spans, strict=False):
        assert (span.kind, span.chosen) == (uncut.kind, uncut.chosen)
        assert [one.token_ids for one in span.candidates] == [one.token_ids for one in uncut.candidates]
        assert len(span.token_margins) == len(span.token_entropies) == len(span.token_ids) == len(span.token_log_probs)
        if span.token_ids == uncut.token_ids:
            assert (span.f_mlds, span.score) == pytest.approx((uncut.f_mlds, uncut.score), abs=1e-3, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3"])
def test_the_first_tokens_do_not_depend_on_the_limit(architecture: str, method: str, tmp_path: Path) -> None:
    engine = engine_of(architecture)
    config = config_of(method, engine.model, tmp_path, max_new_tokens=LONGEST, gamma=0.15, max_span_tokens=6)
    asked = prompts(2)
    whole = [engine.generate(prompt, config=config) for prompt in asked]
    assert any(len(answer.token_ids) > 8 for answer in whole)
    for most in (1, 2, 5, 13, LONGEST - 1):
        shorter = config.replace(max_new_tokens=most)
        for prompt, answer, in_batch in zip(asked, whole, engine.generate_batch(asked, config=shorter), strict=True):
            assert_cut(engine.generate(prompt, config=shorter), answer, most)
            assert_cut(in_batch, answer, most)
        with engine.stream(asked[0], config=shorter) as stream:
            spans = list(stream)
        assert stream.generation is not None
        assert spans == stream.generation.spans
        assert_cut(stream.generation, whole[0], most)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mamba", "gpt_neo"])
@pytest.mark.parametrize(
    "settings",
    [
        {"span_boundary": "left"},
        {"span_boundary": "own"},
        {"span_boundary": "fixed"},
        {"temperature": 2.0, "seed": 3},
        {"stop": ("a", "e")},
        {"span_log_prob": "end_mean", "method": "cocoa"},
    ],
    ids=str,
)
def test_under_other_settings_and_without_a_shared_cache(architecture: str, settings: dict[str, Any]) -> None:
    engine = engine_of(architecture)
    for prompt in prompts(2):
        whole = engine.generate(prompt, max_new_tokens=LONGEST, gamma=0.15, max_span_tokens=6, **settings)
        for most in (1, 4, 9):
            short = engine.generate(prompt, max_new_tokens=most, gamma=0.15, max_span_tokens=6, **settings)
            assert_cut(short, whole, most)


def test_a_cut_span_has_the_figures_of_its_tokens_and_uncut_candidates() -> None:
    engine = engine_of("llama")
    settings: dict[str, Any] = {"gamma": 0.15, "max_span_tokens": 6, "span_boundary": "fixed"}
    (prompt,) = prompts(1)
    whole = engine.generate(prompt, max_new_tokens=LONGEST, **settings)
    before = cut = 0
    for span in whole.spans:
        if span.kind == "risk_point" and len(span.token_ids) > 2 and before + 2 < LONGEST:
            last = engine.generate(prompt, max_new_tokens=before + 2, **settings).spans[-1]
            given = engine.score([*prompt, *whole.token_ids[:before]], span.token_ids[:2]).spans[0]
            assert last.token_ids == span.token_ids[:2]
            assert (last.f_mlds, last.con_mlds) == near((given.f_mlds, given.con_mlds))
            assert last.log_prob == pytest.approx(sum(last.token_log_probs))
            assert last.candidates[last.chosen or 0].token_ids == span.token_ids
            cut += 1
        before += len(span.token_ids)
    assert cut


def test_the_context_window_bounds_the_branches_and_not_the_limit() -> None:
    model = tiny_model("llama", seed=1, max_position_embeddings=32)
    engine = CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))
    prompt = prompts(2)[1]
    settings: dict[str, Any] = {"gamma": 0.05, "span_boundary": "fixed", "max_span_tokens": 16}
    passes = record(engine)
    whole = engine.generate(prompt, max_new_tokens=500, **settings)
    assert len(prompt) + len(whole.token_ids) == 32
    assert whole.finish_reason == "length"
    for most in (1, 5, 20):
        assert_cut(engine.generate(prompt, max_new_tokens=most, **settings), whole, most)
    assert steps(passes)
    fed = [end for span in whole.spans for end in (len(one.token_ids) for one in span.candidates)]
    assert max(fed) <= 16
