"""Replayed answers are those that the engine generates, and answers that agree share their work."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, get_args

import pytest

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, Runtime
from cocoa_engine.equations import SpanLogProb
from cocoa_engine.studies.replay import KnownStep, Replay
from tests.helpers.forward_passes import record
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer

RULES = get_args(SpanLogProb)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "left": {"span_boundary": "left"},
    "own": {"span_boundary": "own"},
    "stop texts": {"stop": ("a", "er", "日", "on")},
    "penalised repetition": {"repetition_penalty": 1.3},
}


@cache
def tiny() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama", seed=1), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))


def prompt(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(20, VOCAB_SIZE) for _ in range(9)]


def rules(config: CocoaConfig) -> list[CocoaConfig]:
    """Every method with every rule, other weights, and greedy decoding last."""
    found = [config.replace(method=method, span_log_prob=rule) for method in ("cocoa", "cocoa-sig") for rule in RULES]
    others = [config.replace(alpha=0.0), config.replace(metric="con_mlds", alpha=30.0, method="cocoa")]
    return [*found, *others, config.replace(method="greedy")]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_rule_answers_as_the_engine_generates(settings: str) -> None:
    config = CocoaConfig(max_new_tokens=24, max_span_tokens=6, gamma=0.1, **SETTINGS[settings])
    different, decoded, whole = set(), 0, 0
    for seed in range(4):
        replay = Replay(tiny(), prompt(seed), config)
        for rule in rules(config):
            expected = tiny().generate(prompt(seed), config=rule)
            answer = replay.answer(rule)
            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text), rule
            assert answer.finish_reason == expected.finish_reason
            different.add((seed, tuple(answer.token_ids)))
            decoded += answer.decoded_tokens
            whole += len(answer.token_ids)
            assert replay.answer(rule) == answer.__class__(answer.token_ids, answer.text, answer.finish_reason, 0) or (
                rule.method == "greedy" or settings == "penalised repetition"
            )
    assert len(different) > 10  # the rules do differ
    assert decoded < whole / 2 or settings == "penalised repetition"


def test_what_is_known_is_not_decoded_again() -> None:
    config = CocoaConfig(max_new_tokens=24, max_span_tokens=6, gamma=0.1)
    replay = Replay(tiny(), prompt(1), config)
    answers = [replay.answer(rule) for rule in rules(config)]
    told = [KnownStep(*step) for step in replay.steps.values()]
    again = Replay(tiny(), prompt(1), config, known=told)
    passes = record(tiny())
    for rule, answer in list(zip(rules(config), answers, strict=True))[:-1]:
        assert again.answer(rule).token_ids == answer.token_ids
    assert not passes


def test_it_stops_where_an_answer_is_complete() -> None:
    config = CocoaConfig(max_new_tokens=24, max_span_tokens=6, gamma=0.1)
    whole = Replay(tiny(), prompt(2), config).answer(config)
    short = Replay(tiny(), prompt(2), config, is_complete=lambda text: len(text) >= 5).answer(config)
    assert short.finish_reason == "complete"
    assert len(short.text) >= 5
    assert short.token_ids == whole.token_ids[: len(short.token_ids)]
    assert len(short.token_ids) < len(whole.token_ids)


def test_the_context_window_ends_an_answer() -> None:
    engine = CocoaEngine(tiny_model("llama", seed=1, max_position_embeddings=24), tiny_tokenizer())
    config = CocoaConfig(max_new_tokens=100, gamma=0.1)
    replay = Replay(engine, prompt(3), config)
    for rule in rules(config):
        assert replay.answer(rule).token_ids == engine.generate(prompt(3), config=rule).token_ids


def test_rules_that_do_more_than_choose_are_refused() -> None:
    config = CocoaConfig()
    replay = Replay(tiny(), prompt(0), config)
    with pytest.raises(ConfigError, match="the same gamma, max_new_tokens"):
        replay.answer(config.replace(gamma=0.5, max_new_tokens=3))
    for method in ("diver", "dola"):
        with pytest.raises(ConfigError, match="forward passes of its own"):
            replay.answer(config.replace(method=method))
    for settings in ({"temperature": 1.0}, {"max_risk": 0.5}):
        with pytest.raises(ConfigError, match="temperature=0 and max_risk=None"):
            Replay(tiny(), prompt(0), CocoaConfig(**settings))
