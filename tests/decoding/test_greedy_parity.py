"""``gamma = 1`` and ``method="greedy"`` are plain greedy decoding: ``model.generate(do_sample=False)`` to the token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cocoa_engine import CocoaEngine
from tests.helpers.prompts import PROMPTS
from tests.helpers.tiny_models import ARCHITECTURES, EOS, VOCAB_SIZE, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

GREEDY: list[dict[str, Any]] = [{"gamma": 1.0}, {"max_candidates": 1}, {"method": "greedy"}]

GENERATION_CONFIGS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "several end tokens": {"eos_token_id": [EOS, *range(3, VOCAB_SIZE, 9)]},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "at least so many tokens": {"eos_token_id": [EOS, *range(3, VOCAB_SIZE, 3)], "min_new_tokens": 7},
    "suppressed tokens": {"suppress_tokens": list(range(3, VOCAB_SIZE, 2))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(3, VOCAB_SIZE, 2))},
    "banned words": {"bad_words_ids": [[token] for token in range(4, VOCAB_SIZE, 3)]},
    "all at once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "eos_token_id": [EOS, *range(3, VOCAB_SIZE, 9)],
        "min_new_tokens": 3,
        "suppress_tokens": [EOS + 3, EOS + 5],
    },
    "sampling defaults, which greedy ignores": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
}


def plain_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What transformers itself generates after the prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=max_new_tokens
    )
    return output[0, len(prompt) :].tolist()


def random_prompts() -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 6, 30)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models(architecture):
    model = tiny_model(architecture, seed=2)
    engine = CocoaEngine(model, tiny_tokenizer())
    prompts = random_prompts()
    expected = [plain_greedy(model, prompt, 16) for prompt in prompts]
    for settings in GREEDY:
        assert engine.generate(prompts[1], max_new_tokens=16, **settings).token_ids == expected[1]
        batch = engine.generate_batch(prompts, max_new_tokens=16, **settings)
        assert [answer.token_ids for answer in batch] == expected
        assert [answer.usage.risk_points for answer in batch] == [0, 0, 0]
        assert {span.kind for answer in batch for span in answer.spans} == {"greedy"}


@pytest.mark.parametrize("name", GENERATION_CONFIGS)
def test_generation_configs(name):
    model = tiny_model("llama", seed=2)
    without = [plain_greedy(model, prompt, 20) for prompt in random_prompts()]
    model.generation_config.update(**GENERATION_CONFIGS[name])
    engine = CocoaEngine(model, tiny_tokenizer())
    expected = [plain_greedy(model, prompt, 20) for prompt in random_prompts()]
    assert (expected != without) is not name.startswith("sampling"), "the case shows nothing"
    assert [engine.generate(p, max_new_tokens=20, gamma=1.0).token_ids for p in random_prompts()] == expected
    batch = engine.generate_batch(random_prompts(), max_new_tokens=20, gamma=1.0)
    assert [answer.token_ids for answer in batch] == expected


@pytest.mark.parametrize("name", ["question", "code", "emoji", "russian"])
def test_real_model(float32_engine, name):
    expected = plain_greedy(float32_engine.model, float32_engine.tokenizer(PROMPTS[name]).input_ids, 16)
    for settings in GREEDY:
        assert float32_engine.generate(PROMPTS[name], max_new_tokens=16, **settings).token_ids == expected
