"""The candidates grown on a given text are those that a decode would weigh there, however they are fed."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
import torch

from cocoa_engine import CocoaConfig, CocoaEngine, NonFiniteLogitsError
from cocoa_engine.equations import SpanLogProb
from cocoa_engine.execution.backends import Backend
from cocoa_engine.scoring.candidates import CandidateGrower
from cocoa_engine.spans import Candidate
from tests.helpers.inside import assert_idle
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PROMPT = [5, 6, 7, 8]
ARCHITECTURES = ("llama", "mistral-sliding", "gemma3_text", "gpt2", "phi", "qwen3", "mamba")
RULES = get_args(SpanLogProb)


def decoded(engine: CocoaEngine, prompt: list[int], text: list[int], config: CocoaConfig) -> list[list[Candidate]]:
    """What a decode weighs at each token of a text, from a prompt that holds what is before it."""
    found = []
    for at in range(len(text)):
        settings = config.replace(max_new_tokens=config.max_span_tokens)
        with engine.stream([*prompt, *text[:at]], config=settings) as stream:
            found.append(next(stream).candidates)
    return found


FIGURES = ("log_prob", "con_mlds", "f_mlds", "score", "token_log_probs", "token_entropies", "token_margins")


def assert_alike(grown: list[list[Candidate]], expected: list[list[Candidate]]) -> None:
    for each, others in zip(grown, expected, strict=True):
        for one, other in zip(each, others, strict=True):
            for name in ("token_ids", "text", "is_greedy", "ends_answer"):
                assert getattr(one, name) == getattr(other, name)
            for figure in FIGURES:
                assert getattr(one, figure) == pytest.approx(getattr(other, figure), abs=2e-3)


def some_text(engine: CocoaEngine, prompt: list[int], tokens: int) -> list[int]:
    """A text that keeps to what is likely, but for every fifth token."""
    dice = random.Random(0)
    text: list[int] = []
    while len(text) < tokens:
        rest = engine.generate([*prompt, *text], max_new_tokens=4).token_ids
        text += [*rest, dice.randrange(3, 200)]
    return text[:tokens]


@pytest.mark.parametrize("boundary", ["right", "own"])
def test_as_a_decode_weighs_them_on_the_real_model(engine: CocoaEngine, boundary: str) -> None:
    config = CocoaConfig(span_boundary=boundary, max_span_tokens=6, metric="con_mlds")
    prompt = engine.encode("Rivers of Europe, the longest first:")
    texts = [engine.encode(text) for text in (" the Volga, the Danube", " the Volga and the Nile", " Rhine")]
    found = CandidateGrower(engine.session, config)(prompt, texts)
    assert sum(bool(each) for grown in found for each in grown) > 8
    for grown, text in zip(found, texts, strict=True):
        assert_alike(grown, decoded(engine, prompt, text, config))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "rule"), [*zip(ARCHITECTURES, RULES, strict=True)])
def test_on_other_architectures_by_each_rule_and_without_a_shared_cache(architecture: str, rule: Any) -> None:
    engine = CocoaEngine(tiny_model(architecture), tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3, span_boundary="own", span_log_prob=rule)
    text = some_text(engine, PROMPT, 14)
    texts = [text, text[:6], [*text[:3], 9, 10]]
    found = CandidateGrower(engine.session, config)(PROMPT, texts)
    assert any(len({len(one.token_ids) for one in candidates}) > 1 for candidates in found[0])
    for grown, one in zip(found, texts, strict=True):
        assert_alike(grown, decoded(engine, PROMPT, one, config))


def test_a_long_text_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3)
    text = some_text(engine, PROMPT, 20)
    at_once = CandidateGrower(engine.session, config)(PROMPT, [text, text[:7]])
    monkeypatch.setattr(Backend, "paths_per_step", 6)
    in_pieces = CandidateGrower(engine.session, config)(PROMPT, [text, text[:7]])
    for grown, expected in zip(in_pieces, at_once, strict=True):
        assert any(expected)
        assert_alike(grown, expected)


def test_branches_end_with_the_context_window() -> None:
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=24), tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3, gamma=0.05)
    text = some_text(engine, PROMPT, 12)
    text += [*some_text(engine, [*PROMPT, *text], 4), 9, 10, 11, 12]
    assert engine.context_window == len(PROMPT) + len(text)
    (grown,) = CandidateGrower(engine.session, config)(PROMPT, [text])
    assert all(len(one.token_ids) <= len(text) - at for at, each in enumerate(grown) for one in each)
    assert_alike(grown[-4:], decoded(engine, PROMPT, text, config)[-4:])


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_logits_that_are_no_numbers_of_a_branch_and_of_the_prompt(architecture: str) -> None:
    model = tiny_model(architecture)
    engine = CocoaEngine(model, tiny_tokenizer())
    config = CocoaConfig(max_span_tokens=5, max_candidates=3, gamma=0.05)
    text = some_text(engine, PROMPT, 6)
    (grown,) = CandidateGrower(engine.session, config)(PROMPT, [text])
    rivals = [one.token_ids[0] for each in grown for one in each if one.token_ids[0] not in [*PROMPT, *text]]
    with torch.no_grad():
        model.get_input_embeddings().weight[rivals[0]] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="of the sequence"):
        CandidateGrower(engine.session, config)(PROMPT, [text])
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="token 4 of the sequence"):
        CandidateGrower(engine.session, CocoaConfig())(PROMPT, [[5, 6]])
    if architecture == "llama":  # the other holds no cache of the engine's
        assert_idle(engine)
