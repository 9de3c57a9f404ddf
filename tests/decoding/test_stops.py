"""A stop only cuts: what stands before it is what the answer without a stop says there."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList

from cocoa_engine import CocoaEngine, Generation, Runtime
from cocoa_engine.config import MethodName
from tests.helpers.prompts import PROMPTS
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import BOS, PAD, WellFormedText, sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer

TOKENIZERS = {"byte-level": tiny_tokenizer, "sentencepiece": sentencepiece_like_tokenizer}
PROMPT_TEXTS = ["the ", "das ist", "日本", "Ω 😀", "да, да", "\n\n"]
LENGTH_RULES = ["sum", "greedy_end", "mean", "end_mean", "common_length", "gnmt"]


@cache
def engine_with(tokenizer: str, architecture: str, draft_tokens: int) -> CocoaEngine:
    model = tiny_model(architecture, seed=1)
    return CocoaEngine(model, TOKENIZERS[tokenizer](), runtime=Runtime(draft_tokens=draft_tokens))


class EndsOn(StoppingCriteria):
    """The answer ends with any of some tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return int(input_ids[0, -1]) in self.tokens


def token_ends(answer: Generation) -> list[int]:
    return [end for span in answer.spans for end in span.token_ends]


def first_stop(free: Generation, stops: list[str], ids: list[int]) -> tuple[int, str] | None:
    """After how many tokens of an answer without stops it stops, and the text before the stop; `None` if it does not.

    Args:
        stops: the stop texts.
        ids: tokens at which it stops too.
    """
    for number, (token_id, end) in enumerate(zip(free.token_ids, token_ends(free), strict=True), 1):
        text = free.text[:end]
        if met := [text.find(stop) for stop in stops if stop in text]:
            return number, text[: min(met)]
        if token_id in ids:
            return number, text
    return None


def assert_only_cut(stopped: Generation, free: Generation, stops: list[str], ids: list[int]) -> None:
    """The stopped answer is the free one up to the first stop, span by span."""
    at = first_stop(free, stops, ids)
    tokens, text = (len(free.token_ids), free.text) if at is None else at
    assert stopped.token_ids == free.token_ids[:tokens]
    assert stopped.text == text
    assert "".join(span.text for span in stopped.spans) == text
    reasons = {free.finish_reason} if at is None else {"stop", "risk"} | {free.finish_reason}
    assert stopped.finish_reason in reasons
    for span, whole in zip(stopped.spans, free.spans, strict=False):
        count = len(span.token_ids)
        assert (span.kind, span.token_ids, span.chosen) == (whole.kind, whole.token_ids[:count], whole.chosen)
        assert whole.text[: len(span.text)] == span.text
        assert len(span.text) == len(whole.text) or span.end == len(text)
        assert span.token_log_probs == pytest.approx(whole.token_log_probs[:count], rel=1e-4, abs=1e-6)
        assert [one.token_ids for one in span.candidates] == [one.token_ids for one in whole.candidates]
        assert [one.text for one in span.candidates] == [one.text for one in whole.candidates]
        assert [one.score for one in span.candidates] == pytest.approx(
            [one.score for one in whole.candidates], rel=1e-4
        )
        if count == len(whole.token_ids):
            assert (span.risk, span.score) == pytest.approx((whole.risk, whole.score), rel=1e-4)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stop_only_cuts(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For every method and rule: texts that stand anywhere in the answer, special tokens, and stopping criteria."""
    pick = data.draw
    architecture = pick(st.sampled_from(["llama", "llama", "gpt2", "mamba"]))
    method = pick(st.sampled_from([*["cocoa-sig"] * 4, *get_args(MethodName)]))
    if architecture == "mamba" and method in ("dola", "decore", "diver"):
        method = "cocoa-sig"
    engine = engine_with(pick(st.sampled_from(sorted(TOKENIZERS))), architecture, pick(st.sampled_from([0, 6])))
    options: dict[str, Any] = {
        "max_new_tokens": 16,
        "gamma": pick(st.sampled_from([0.1, 0.3])),
        "max_candidates": pick(st.sampled_from([2, 5])),
        "max_span_tokens": pick(st.sampled_from([2, 16])),
        "span_boundary": pick(st.sampled_from(["right", "left", "own", "fixed"])),
        "span_log_prob": pick(st.sampled_from(LENGTH_RULES)),
        "top_logprobs": pick(st.sampled_from([0, 2])),
        "max_risk": pick(st.sampled_from([None, None, 0.9])),
        "seed": 3,
    }
    if method in ("cocoa-sig", "cocoa", "sample"):
        options["temperature"] = pick(st.sampled_from([0.0, 0.7]))
    config = config_of(method, engine.model, tmp_path_factory.getbasetemp(), **options)
    shared: dict[str, Any] = {"config": config}
    if pick(st.booleans()):
        shared["logits_processor"] = WellFormedText(engine.tokenizer)
    prompt = pick(st.sampled_from(PROMPT_TEXTS))
    free = engine.generate(prompt, **shared)
    stops = []
    for _ in range(pick(st.integers(0, 2))):
        start = pick(st.integers(0, max(0, len(free.text) - 1)))
        stops.append(free.text[start : pick(st.integers(start + 1, start + 6))])
    stops += pick(st.lists(st.text("abc the日é\n😀", min_size=1, max_size=2), max_size=2))
    candidates = [one.text for span in free.spans for one in span.candidates if one.text.strip("\ufffd")]
    if candidates:  # what a candidate says that was not kept
        stops.append(pick(st.sampled_from(candidates)).strip("\ufffd")[-2:])
    stops = list(dict.fromkeys(filter(None, stops)))
    special = pick(st.booleans())
    ids = pick(st.lists(st.sampled_from(free.token_ids), max_size=2)) if pick(st.booleans()) else []
    stopping: dict[str, Any] = {**shared, "stop": [*stops, *(["<bos>", "<pad>"] if special else [])]}
    if ids:
        stopping["stopping_criteria"] = StoppingCriteriaList([EndsOn(ids)])

    stopped = engine.generate(prompt, **stopping)

    assert_only_cut(stopped, free, stops, [*ids, *([BOS, PAD] if special else [])])
    assert stopped.usage.forward_passes <= free.usage.forward_passes
    stream = engine.stream(prompt, **stopping)
    assert list(stream) == stopped.spans
    both = engine.generate_batch(["other", prompt], **stopping)[1]
    assert (both.text, both.token_ids, both.finish_reason) == (stopped.text, stopped.token_ids, stopped.finish_reason)


def test_a_stop_in_a_grammar_only_cuts(engine: CocoaEngine) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "river": {"type": "string"}}}
    grammar = engine.constrain(json_schema={**schema, "required": ["city", "river"]})
    free = engine.generate(PROMPTS["json"], max_new_tokens=24, logits_processor=grammar)
    for stop in ('"', '",', "river", free.text[9:13]):
        stopped = engine.generate(PROMPTS["json"], max_new_tokens=24, logits_processor=grammar, stop=stop)
        assert_only_cut(stopped, free, [stop], [])


def test_criteria_are_asked_of_the_answer_alone() -> None:
    """Once for each token of the answer, in order: not of candidates that are dropped."""
    engine = engine_with("byte-level", "llama", 6)
    seen: list[list[int]] = []

    class Notes(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
            seen.append(input_ids[0].tolist())
            return False

    prompt = list(range(5, 15))
    answer = engine.generate(prompt, stopping_criteria=Notes(), gamma=0.1, max_new_tokens=20)
    assert answer.usage.risk_points > 1
    assert seen == [[*prompt, *answer.token_ids[:count]] for count in range(1, len(answer.token_ids) + 1)]
