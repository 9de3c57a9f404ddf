"""Rules for candidates of unequal length, in the decode loop: which answers they end."""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from cocoa_engine import CocoaConfig, CocoaEngine, Runtime
from cocoa_engine.equations import may_be_kept
from tests.helpers.tiny_models import EOS, VOCAB_SIZE, tiny_model, tiny_tokenizer


@cache
def tiny(architecture: str = "llama") -> CocoaEngine:
    return CocoaEngine(tiny_model(architecture, seed=1), tiny_tokenizer(), runtime=Runtime(prefix_cache_mb=0))


def prompt(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(20, VOCAB_SIZE) for _ in range(7)]


class EndsAtOnce(LogitsProcessor):
    """The first token is 40 (55 %) or an end (45 %). Each further token has four equally probable choices.

    An end therefore has log p -0.8, and any other candidate of three tokens at most -0.6 - 2 * 1.4.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        result = torch.full_like(scores, -torch.inf)
        if input_ids.shape[1] == self.length:
            result[:, 40], result[:, EOS] = math.log(0.55), math.log(0.45)
        else:
            result[:, 50:54] = 0.0
        return result


@pytest.mark.parametrize(
    ("rule", "empty"),
    [("sum", True), ("gnmt", True), ("greedy_end", False), ("common_length", False), (None, False)],
)
def test_an_end_token_that_comes_at_once(rule: str | None, empty: bool) -> None:
    """By the sum it wins, for it is a sum of one term. By default it does not."""
    settings: dict[str, Any] = {"max_new_tokens": 6, "span_boundary": "fixed", "max_span_tokens": 3, "alpha": 0.0}
    config = CocoaConfig(**settings) if rule is None else CocoaConfig(**settings, span_log_prob=rule)
    answer = tiny().generate(prompt(0), config=config, logits_processor=EndsAtOnce(len(prompt(0))))
    assert (answer.token_ids == [EOS]) == empty
    assert [one.ends_answer for one in answer.spans[0].candidates] == [False, True]
    assert answer.spans[0].candidates[0].is_greedy
    assert CocoaConfig.paper().span_log_prob == "sum"


def often_an_end(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """An end token competes everywhere, a little less probable than the best token."""
    scores = scores.clone()
    scores[:, EOS] = -torch.inf
    scores[:, EOS] = scores.max(dim=-1).values - 0.3
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_only_greedy_decoding_ends_an_answer(architecture: str) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "gamma": 0.2, "max_span_tokens": 4, "span_boundary": "fixed"}
    settings |= {"stop": ("a", "er", "on"), "logits_processor": often_an_end, "alpha": 0.0}
    excluded = by_sum = 0
    for seed in range(3):
        answer = tiny(architecture).generate(prompt(seed), span_log_prob="greedy_end", **settings)
        assert EOS not in answer.token_ids
        for span in answer.spans:
            if span.chosen is None:
                continue
            one = span.candidates[span.chosen]
            assert one.is_greedy or not one.ends_answer
            allowed = may_be_kept("greedy_end", [candidate.ends_answer for candidate in span.candidates])
            assert one.score == max(each.score for each, may in zip(span.candidates, allowed, strict=True) if may)
            excluded += one.score < max(candidate.score for candidate in span.candidates)
        by_sum += EOS in tiny(architecture).generate(prompt(seed), span_log_prob="sum", **settings).token_ids
    assert excluded
    assert by_sum


def test_an_excluded_candidate_is_not_sampled_either() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 3, "span_boundary": "fixed", "max_span_tokens": 3}
    settings |= {"temperature": 100.0, "logits_processor": EndsAtOnce(len(prompt(0)))}
    for rule, first in (("sum", {40, EOS}), ("greedy_end", {40})):
        sampled = (tiny().generate(prompt(0), span_log_prob=rule, seed=seed, **settings) for seed in range(12))
        assert {answer.token_ids[0] for answer in sampled} == first
