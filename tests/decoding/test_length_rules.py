"""Rules for candidates of unequal length, in the decode loop: which answers they end."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cocoa_engine import CocoaConfig
from cocoa_engine.equations import may_be_kept
from tests.helpers.engines import engine_of, prompt
from tests.helpers.tiny_models import EOS, tiny_model

PROMPT = prompt(0)
FIXED: dict[str, Any] = {"span_boundary": "fixed", "max_span_tokens": 3}


def ends_at_once(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The first token is 40 (55 %) or an end (45 %). Each further token has four equally probable choices.

    An end therefore has log p -0.8, and any other candidate of three tokens at most -0.6 - 2 * 1.4.
    """
    result = torch.full_like(scores, -torch.inf)
    if input_ids.shape[1] == len(PROMPT):
        result[:, 40], result[:, EOS] = math.log(0.55), math.log(0.45)
    else:
        result[:, 50:54] = 0.0
    return result


def test_an_end_token_that_comes_at_once() -> None:
    """By the sum it wins, for it is a sum of one term. By default it does not."""
    engine = engine_of(tiny_model("llama", seed=1))
    for rules, empty in ((("sum", "gnmt"), True), (("greedy_end", "common_length", None), False)):
        for rule in rules:
            settings = FIXED if rule is None else {**FIXED, "span_log_prob": rule}
            config = CocoaConfig(max_new_tokens=6, alpha=0.0, **settings)
            answer = engine.generate(PROMPT, config=config, logits_processor=ends_at_once)
            assert (answer.token_ids == [EOS]) == empty, rule
            assert [one.ends_answer for one in answer.spans[0].candidates] == [False, True]
            assert answer.spans[0].candidates[0].is_greedy
    assert CocoaConfig.paper().span_log_prob == "sum"
    # nor is an excluded candidate sampled
    settings = {**FIXED, "max_new_tokens": 3, "temperature": 100.0, "logits_processor": ends_at_once}
    for rule, first in (("sum", {40, EOS}), ("greedy_end", {40})):
        sampled = (engine.generate(PROMPT, span_log_prob=rule, seed=seed, **settings) for seed in range(12))
        assert {answer.token_ids[0] for answer in sampled} == first


def often_an_end(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """An end token competes everywhere, a little less probable than the best token."""
    scores = scores.clone()
    scores[:, EOS] = -torch.inf
    scores[:, EOS] = scores.max(dim=-1).values - 0.3
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_only_greedy_decoding_ends_an_answer(architecture: str) -> None:
    engine = engine_of(tiny_model(architecture, seed=1))
    settings: dict[str, Any] = {"max_new_tokens": 12, "gamma": 0.2, "max_span_tokens": 4, "span_boundary": "fixed"}
    settings |= {"stop": ("a", "er", "on"), "logits_processor": often_an_end, "alpha": 0.0}
    excluded = by_sum = 0
    for seed in range(3):
        answer = engine.generate(prompt(seed), span_log_prob="greedy_end", **settings)
        assert EOS not in answer.token_ids
        for span in answer.spans:
            if span.chosen is None:
                continue
            one = span.candidates[span.chosen]
            assert one.is_greedy or not one.ends_answer
            allowed = may_be_kept("greedy_end", [candidate.ends_answer for candidate in span.candidates])
            assert one.score == max(each.score for each, may in zip(span.candidates, allowed, strict=True) if may)
            excluded += one.score < max(candidate.score for candidate in span.candidates)
        by_sum += EOS in engine.generate(prompt(seed), span_log_prob="sum", **settings).token_ids
    assert excluded
    assert by_sum
