"""The engine decodes as the naive reference does: tokens, spans, candidates, choices and figures.

``gamma = 1`` and ``method="greedy"`` are plain greedy decoding: ``model.generate(do_sample=False)`` to the token.
"""

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from cocoa_engine import CocoaConfig, CocoaEngine, Generation
from tests.helpers.prompts import LONG, PROMPTS
from tests.helpers.reference import FullForward, Reference, ReferenceGeneration, assert_same
from tests.helpers.tiny_models import ARCHITECTURES, EOS, NUM_LAYERS, VOCAB_SIZE, tiny_model, tiny_tokenizer

KNIFE_EDGE = 1e-4
"""A decision nearer than this may fall either way by rounding; such cases are counted and left out."""

compared = {"all": 0, "on a knife edge": 0}


def check(actual: Generation, expected: ReferenceGeneration) -> None:
    """Assert that the answers are the same unless one of the decisions is on a knife edge."""
    compared["all"] += 1
    if expected.margin < KNIFE_EDGE:
        compared["on a knife edge"] += 1
    else:
        assert_same(actual, expected)


def compare(
    engine: CocoaEngine, forward: FullForward, config: CocoaConfig, prompt: list[int], *answers: Generation, **more: Any
) -> tuple[Generation, ReferenceGeneration]:
    """Check answers to a prompt, and the engine's own one. Returns this and the expected one."""
    answer = engine.generate(prompt, config=config, **more)
    forward.foresee(prompt, answer)
    expected = Reference(forward, engine.tokenizer, config, **more).generate(prompt)
    for each in (answer, *answers):
        check(each, expected)
    return answer, expected


@cache
def tiny(architecture: str) -> tuple[CocoaEngine, FullForward]:
    model = tiny_model(architecture, seed=1)
    return CocoaEngine(model, tiny_tokenizer()), FullForward(model)


def random_prompt(seed: int, length: int | None = None) -> list[int]:
    dice = random.Random(seed)
    length = length or dice.choice([1, 2, 7, 20, 40])
    return [dice.randrange(3, VOCAB_SIZE) for _ in range(length)]


def grid(seed: int) -> list[dict[str, Any]]:
    """Every method with every metric, boundary, length rule and layer choice, shuffled, with other limits at random."""
    choices: dict[str, list[Any]] = {
        "method": ["cocoa-sig", "cocoa", "greedy"],
        "metric": ["f_mlds", "con_mlds"],
        "span_boundary": ["right", "left", "own", "fixed"],
        "span_log_prob": ["sum", "mean", "common_length", "end_mean", "greedy_end", "gnmt", "sqrt"],
        "final_layer": ["post_norm", "pre_norm"],
        "middle_layers": [None, (0, 1), (1, NUM_LAYERS - 1), (0, NUM_LAYERS)],
    }
    dice = random.Random(seed)
    cases = [
        {
            **dict(zip(choices, case, strict=True)),
            "gamma": dice.choice([0.1, 0.3, 0.3, 0.6]),
            "alpha": dice.choice([0.5, 2.5, 10.0]),
            "max_candidates": dice.choice([2, 3, 8]),
            "max_span_tokens": dice.choice([1, 3, 16]),
        }
        for case in itertools.product(*choices.values())
    ]
    dice.shuffle(cases)
    return cases


CASES_EACH = 3
CASES = [
    pytest.param(architecture, settings, number, id=f"{architecture}-{number}")
    for number, (settings, architecture) in enumerate(zip(grid(seed=0), list(ARCHITECTURES) * CASES_EACH, strict=False))
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "settings", "number"), CASES)
def test_grid_on_tiny_models(architecture, settings, number):
    engine, forward = tiny(architecture)
    config, prompt = CocoaConfig(max_new_tokens=12, **settings), random_prompt(number)
    answer, _ = compare(engine, forward, config, prompt)
    stream = engine.stream(prompt, config=config)
    assert list(stream) == answer.spans
    assert stream.generation == answer
    candidates = [candidate for span in answer.spans for candidate in span.candidates]
    assert all(candidate.ends_answer == (candidate.token_ids[-1] == EOS) for candidate in candidates)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ragged_batch_on_tiny_models(architecture):
    engine, forward = tiny(architecture)
    config = CocoaConfig(max_new_tokens=8, max_candidates=3, middle_layers=(1, 4))
    prompts = [random_prompt(seed, length) for seed, length in enumerate([9, 1, 23])]
    for prompt, answer in zip(prompts, engine.generate_batch(prompts, config=config), strict=True):
        compare(engine, forward, config, prompt, answer)


REAL_SETTINGS: list[dict[str, Any]] = [
    {},
    {"method": "cocoa", "metric": "con_mlds", "span_boundary": "own", "span_log_prob": "mean"},
    {"final_layer": "pre_norm", "span_boundary": "left", "middle_layers": (5, 25)},
    {"method": "greedy", "metric": "con_mlds"},
    {"span_boundary": "fixed", "max_span_tokens": 3, "alpha": 1.0},
]
REAL_GROUPS = [
    pytest.param([*PROMPTS][start :: len(REAL_SETTINGS)], settings, id=settings.get("span_boundary", "right"))
    for start, settings in enumerate(REAL_SETTINGS)
]


@pytest.fixture(scope="module")
def real_forward(float32_engine: CocoaEngine) -> FullForward:
    return FullForward(float32_engine.model)


@pytest.mark.parametrize(("names", "settings"), REAL_GROUPS)
def test_real_model(float32_engine, real_forward, names, settings):
    config = CocoaConfig(**{"max_new_tokens": 4, "max_candidates": 3, "max_span_tokens": 4, **settings})
    prompts = [PROMPTS[name] for name in names]
    batch = float32_engine.generate_batch(prompts, config=config)
    for prompt, from_batch in zip(prompts, batch, strict=True):
        ids = float32_engine.tokenizer(prompt).input_ids
        compare(float32_engine, real_forward, config, ids, from_batch)
        assert from_batch.usage.prompt_tokens == len(ids)


def test_long_context_on_the_real_model(float32_engine, real_forward):
    config = CocoaConfig(max_new_tokens=2, max_candidates=2, max_span_tokens=2)
    ids = float32_engine.tokenizer(LONG).input_ids
    assert 1_000 < len(ids) < 1_100
    assert compare(float32_engine, real_forward, config, ids)[1].risk_points > 0


@pytest.mark.slow
@pytest.mark.parametrize("boundary", ["right", "left", "own", "fixed"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba"])
def test_branches_that_end_early(architecture, boundary):
    """With many end tokens, branches end at different lengths; an end that greedy decoding has not is not kept."""
    model = tiny_model(architecture, seed=1)
    model.generation_config.eos_token_id = [EOS, *range(3, VOCAB_SIZE, 8)]
    engine, forward = CocoaEngine(model, tiny_tokenizer()), FullForward(model)
    uneven = excluded = 0
    for seed in range(3):
        config = CocoaConfig(max_new_tokens=10, max_span_tokens=5, span_boundary=boundary, gamma=0.15)
        answer, expected = compare(engine, forward, config, random_prompt(seed))
        uneven += any(len({len(c.token_ids) for c in span.candidates}) > 1 for span in expected.spans)
        for span in answer.spans:
            best = max(span.candidates, key=lambda candidate: candidate.score, default=None)
            excluded += best is not None and best.ends_answer and not best.is_greedy
    assert uneven > 0 or boundary == "left"
    assert excluded > 0 or boundary != "fixed"


def test_sampled_branches_follow_the_seed():
    engine, forward = tiny("llama")
    prompts = [random_prompt(seed, length) for seed, length in enumerate([6, 2, 15])]
    sampled = [
        engine.generate_batch(prompts, temperature=3.0, seed=seed, max_new_tokens=12) for seed in (1, 1, 2, 3, 4)
    ]
    assert sampled[0] == sampled[1]
    assert len({tuple(tuple(answer.token_ids) for answer in answers) for answers in sampled}) > 2
    for prompt, from_batch in zip(prompts, sampled[0], strict=True):
        alone = engine.generate(prompt, temperature=3.0, seed=1, max_new_tokens=12)
        assert alone.token_ids == from_batch.token_ids
        choices = [span.chosen for span in alone.spans if span.chosen is not None]
        replayed = Reference(forward, engine.tokenizer, alone.config, choices=choices).generate(prompt)
        check(alone, replayed)
        check(from_batch, replayed)


@pytest.mark.slow
def test_branches_are_sampled_from_softmax_of_score_by_temperature():
    engine, _ = tiny("llama")
    temperature, draws = 2.0, 250
    prompt = next(
        prompt
        for prompt in map(random_prompt, range(100))
        if engine.generate(prompt, max_new_tokens=1, gamma=0.05).usage.risk_points
    )
    spans = [
        engine.generate(prompt, max_new_tokens=1, gamma=0.05, temperature=temperature, seed=seed).spans[0]
        for seed in range(draws)
    ]
    scores = torch.tensor([candidate.score for candidate in spans[0].candidates])
    for index, p in enumerate((scores / temperature).softmax(-1).tolist()):
        share = sum(span.chosen == index for span in spans) / draws
        assert abs(share - p) < 4 * (p * (1 - p) / draws) ** 0.5


def forbids(tokens: list[int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        return scores.index_fill(1, torch.tensor(tokens), -torch.inf)

    return process


EVEN = list(range(4, VOCAB_SIZE, 2))
PROCESSORS = {
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.7)],
    "no repeated pair": [NoRepeatNGramLogitsProcessor(2)],
    "banned tokens": [forbids(EVEN)],
    "all three": [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2), forbids(EVEN[::3])],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name"), [*itertools.product(["llama", "gpt2"], PROCESSORS), ("mamba", "all three")]
)
def test_logits_processors_act_on_every_branch(architecture, name):
    engine, forward = tiny(architecture)
    config, processors = CocoaConfig(max_new_tokens=12, gamma=0.2), LogitsProcessorList(PROCESSORS[name])
    prompts = [random_prompt(seed, length) for seed, length in enumerate([5, 12])]
    batch = engine.generate_batch(prompts, config=config, logits_processor=processors)
    for prompt, from_batch in zip(prompts, batch, strict=True):
        compare(engine, forward, config, prompt, from_batch, logits_processor=processors)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name"),
    [*((each, None) for each in ARCHITECTURES), *(("llama", each) for each in GENERATION_CONFIGS)],
)
def test_greedy_tiny_models(architecture, name):
    model = tiny_model(architecture, seed=2)
    prompts = [random_prompt(seed, length) for seed, length in enumerate([1, 6, 30])]
    without = [plain_greedy(model, prompt, 20) for prompt in prompts] if name else None
    model.generation_config.update(**GENERATION_CONFIGS.get(name, {}))
    engine = CocoaEngine(model, tiny_tokenizer())
    expected = [plain_greedy(model, prompt, 20) for prompt in prompts]
    assert (expected == without) is bool(name and name.startswith("sampling")), "the case shows nothing"
    for settings in GREEDY:
        assert engine.generate(prompts[1], max_new_tokens=20, **settings).token_ids == expected[1]
        batch = engine.generate_batch(prompts, max_new_tokens=20, **settings)
        assert [answer.token_ids for answer in batch] == expected
        assert [answer.usage.risk_points for answer in batch] == [0, 0, 0]
        assert {span.kind for answer in batch for span in answer.spans} == {"greedy"}


def test_hardly_any_case_is_on_a_knife_edge():
    """Runs last: the comparisons above were comparisons."""
    assert compared["on a knife edge"] <= 0.03 * compared["all"] + 1
