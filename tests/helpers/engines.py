"""Engines of tiny models for tests of many calls at once, and prompts for them."""

from typing import Any

import torch

from cocoa_engine import CocoaEngine, Runtime
from tests.helpers.tiny_models import VOCAB_SIZE, endless_tokenizer, tiny_model, tiny_tokenizer


def prompt(seed: int, length: int = 12) -> list[int]:
    """Random tokens; prompts of different seeds begin differently."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, VOCAB_SIZE, (length,), generator=generator).tolist()


def engine_of(model: Any, **runtime: Any) -> CocoaEngine:
    """An engine without caches that make a later call cheaper."""
    return CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(**{"prefix_cache_mb": 0, **runtime}))


def endless(**runtime: Any) -> CocoaEngine:
    """Of a model that never ends by itself."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return CocoaEngine(model, endless_tokenizer(), runtime=Runtime(**{"prefix_cache_mb": 0, **runtime}))
