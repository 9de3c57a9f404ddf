"""``top_logprobs`` against a plain forward pass: the most probable tokens that each kept token was chosen among."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from cocoa_engine import CocoaConfig, CocoaEngine, Generation
from tests.helpers.alike import near
from tests.helpers.engines import prompt as random_prompt
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

COUNT = 5


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama", seed=6), tiny_tokenizer())


def check(engine: CocoaEngine, prompt: list[int], answer: Generation, processors: Any = ()) -> None:
    """For each token of an answer: the most probable tokens and their log-probabilities, from one forward pass."""
    ids, at = torch.tensor([[*prompt, *answer.token_ids]]), len(prompt)
    with torch.inference_mode():
        logits = engine.model(ids).logits[0].float()
    for span in answer.spans:
        for token_id, log_prob, top in zip(span.token_ids, span.token_log_probs, span.top_log_probs or (), strict=True):
            scores = LogitsProcessorList(processors)(ids[:, :at], logits[at - 1][None])[0]
            expected = scores.log_softmax(-1).topk(COUNT)
            assert log_prob == near(dict(top).get(token_id, log_prob))
            assert [token_id for token_id, _ in top] == expected.indices.tolist()
            assert [value for _, value in top] == near(expected.values.tolist())
            at += 1
    assert at == ids.shape[1]


OPTIONS: list[dict[str, Any]] = [
    {"method": "greedy"},
    {"max_candidates": 2},
    {"max_candidates": 8, "span_boundary": "own"},
    {"repetition_penalty": 1.4},
    {"method": "greedy", "repetition_penalty": 1.4},
    {"method": "dola", "dola_layers": "1,2", "repetition_penalty": 1.0},  # the model's own distribution
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_they_are_those_of_a_plain_forward_pass(engine: CocoaEngine, options: dict[str, Any]) -> None:
    settings = {**options, "max_new_tokens": 24}
    prompt = random_prompt(0)
    penalty = options.get("repetition_penalty")
    processors = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty not in (None, 1.0) else []
    answer = engine.generate(prompt, **settings, top_logprobs=COUNT)
    check(engine, prompt, answer, processors)
    plain = engine.generate(prompt, **settings)
    assert plain.token_ids == answer.token_ids  # recording changes nothing else
    assert all(span.top_log_probs is None for span in plain.spans)
    assert Generation.model_validate_json(answer.model_dump_json()) == answer


def test_batch_and_stream_have_them(engine: CocoaEngine) -> None:
    prompts = [random_prompt(seed) for seed in range(3)]
    config = CocoaConfig(max_new_tokens=16, top_logprobs=COUNT)
    for prompt, answer in zip(prompts, engine.generate_batch(prompts, config=config), strict=True):
        check(engine, prompt, answer)
    with engine.stream(prompts[0], config=config) as stream:
        spans = list(stream)
    assert stream.generation is not None
    assert spans == stream.generation.spans
    check(engine, prompts[0], stream.generation)


def test_where_a_grammar_allows_one_token_there_is_one(engine: CocoaEngine) -> None:
    grammar = engine.constrain(regex="ab")
    answer = engine.generate("A number: ", logits_processor=grammar, top_logprobs=3, max_new_tokens=4)
    ((_, log_prob),) = (answer.spans[0].top_log_probs or [])[0]
    assert log_prob == 0


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_given_texts_have_them(engine: CocoaEngine, divide: bool, many: bool) -> None:
    prompt, config = random_prompt(1), CocoaConfig(method="greedy", max_new_tokens=12, top_logprobs=COUNT)
    text = [*engine.generate(prompt, config=config).token_ids[:6], 40, 41]
    assert len(text) == 8
    given: Any = [text, [*text[:3], 50], text[:1]] if many else text
    scored: Any = engine.score(prompt, given, config=config, divide=divide)
    for one in scored if many else [scored]:
        check(engine, prompt, one)
    tokens = [
        (token_id == top[0][0], log_prob == top[0][1])
        for span in (scored[0] if many else scored).spans
        for token_id, log_prob, top in zip(span.token_ids, span.token_log_probs, span.top_log_probs or (), strict=True)
    ]
    assert tokens == [(True, True)] * 6 + [(False, False)] * 2  # exactly equal: clients compare the two
