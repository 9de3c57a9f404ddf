"""Where answers end: by stops and ``max_new_tokens``, which only cut, and by rules for candidates of unequal length."""

import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, Runtime
from cocoa_engine.config import MethodName
from tests.helpers.alike import answers, near
from tests.helpers.inside import record, steps
from tests.helpers.mutations import fuzz
from tests.helpers.prompts import PROMPTS
from tests.helpers.rivals import config_of
from tests.helpers.tiny_models import (
    BOS,
    EOS,
    PAD,
    VOCAB_SIZE,
    WellFormedText,
    engine_of,
    pieces_tokenizer,
    tiny_model,
    tiny_tokenizer,
)

TOKENIZERS = {"byte-level": tiny_tokenizer, "sentencepiece": pieces_tokenizer}
PROMPT_TEXTS = ["the ", "das ist", "日本", "Ω 😀", "да, да", "\n\n"]
LENGTH_RULES = ["sum", "greedy_end", "mean", "end_mean", "common_length", "gnmt"]


@cache
def engine_with(tokenizer: str, architecture: str, draft_tokens: int) -> CocoaEngine:
    model = tiny_model(architecture, seed=1)
    return CocoaEngine(model, TOKENIZERS[tokenizer](), runtime=Runtime(draft_tokens=draft_tokens))


def first_stop(free: Generation, stops: Sequence[str], ids: Sequence[int], most: int) -> tuple[int, str] | None:
    """After how many tokens an answer without stops would stop, and the text before the stop; `None` if nowhere."""
    ends = [end for span in free.spans for end in span.token_ends]
    for number, (token_id, end) in enumerate(zip(free.token_ids, ends, strict=True), 1):
        text = free.text[:end]
        if met := [text.find(stop) for stop in stops if stop in text]:
            return number, text[: min(met)]
        if token_id in ids or number == most:
            return number, text
    return None


def assert_only_cut(
    stopped: Generation, free: Generation, stops: Sequence[str] = (), ids: Sequence[int] = (), most: int = 1000
) -> None:
    at = first_stop(free, stops, ids, most)
    tokens, text = (len(free.token_ids), free.text) if at is None else at
    assert stopped.token_ids == free.token_ids[:tokens]
    assert stopped.text == text
    assert "".join(span.text for span in stopped.spans) == text
    if most < len(free.token_ids):
        assert stopped.finish_reason == "length"
    else:
        reasons = {free.finish_reason} if at is None else {"stop", "risk"} | {free.finish_reason}
        assert stopped.finish_reason in reasons
    for span, whole in zip(stopped.spans, free.spans, strict=False):
        count = len(span.token_ids)
        assert (span.kind, span.token_ids, span.chosen) == (whole.kind, whole.token_ids[:count], whole.chosen)
        assert whole.text[: len(span.text)] == span.text
        assert len(span.text) == len(whole.text) or span.end == len(text)
        assert span.token_log_probs == pytest.approx(whole.token_log_probs[:count], rel=1e-4, abs=1e-6)
        assert len(span.token_log_probs) == len(span.token_margins) == len(span.token_entropies) == count
        assert [one.token_ids for one in span.candidates] == [one.token_ids for one in whole.candidates]
        assert [one.text for one in span.candidates] == [one.text for one in whole.candidates]
        assert [one.score for one in span.candidates] == pytest.approx(
            [one.score for one in whole.candidates], rel=1e-4
        )
        if count == len(whole.token_ids):
            figures = (whole.risk, whole.score, whole.f_mlds)
            assert (span.risk, span.score, span.f_mlds) == pytest.approx(figures, rel=1e-4)


@pytest.mark.slow
@fuzz(30)
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
        stopping["stopping_criteria"] = lambda input_ids, _: int(input_ids[0, -1]) in ids

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
        assert_only_cut(stopped, free, [stop])


LONGEST = 20
BRANCHING: dict[str, Any] = {"max_new_tokens": LONGEST, "gamma": 0.15, "max_span_tokens": 6}
METHODS = ("greedy", "cocoa", "cocoa-sig", "diver", "dola", "decore")
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(("cocoa-sig", {"span_boundary": boundary}) for boundary in ("left", "own", "fixed")),
    ("cocoa-sig", {"temperature": 2.0, "seed": 3}),
    ("cocoa-sig", {"stop": ("a", "e")}),
    ("cocoa", {"span_log_prob": "end_mean"}),
]
LIMITED = [
    *((architecture, method, {}) for architecture in ("llama", "gemma3_text") for method in METHODS),
    *((architecture, *settings) for architecture in ("llama", "mamba", "gpt_neo") for settings in SETTINGS),
]


@cache
def limited(architecture: str, **overrides: int) -> CocoaEngine:
    return engine_of(tiny_model(architecture, seed=1, **overrides))


def prompts() -> list[list[int]]:
    dice = random.Random(11)
    return [[dice.randrange(20, VOCAB_SIZE) for _ in range(length)] for length in (3, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "method", "settings"), LIMITED, ids=str)
def test_the_first_tokens_do_not_depend_on_the_limit(
    architecture: str, method: str, settings: Any, tmp_path: Path
) -> None:
    engine = limited(architecture)
    config = config_of(method, engine.model, tmp_path, **BRANCHING, **settings)
    whole = [engine.generate(prompt, config=config) for prompt in prompts()]
    assert any(len(answer.token_ids) > 8 for answer in whole) or config.stop
    for most in (1, 4, 13, LONGEST - 1):
        shorter = config.replace(max_new_tokens=most)
        first, second = prompts()
        cut = [*answers(engine.stream(first, config=shorter)), engine.generate(second, config=shorter)]
        cut += engine.generate_batch([first, second], config=shorter)
        for answer, whole_answer in zip(cut, whole * 2, strict=True):
            assert_only_cut(answer, whole_answer, most=most)


def test_a_cut_span_has_the_figures_of_its_tokens_and_uncut_candidates() -> None:
    engine, settings = limited("llama"), {**BRANCHING, "span_boundary": "fixed"}
    prompt, _ = prompts()
    whole = engine.generate(prompt, **settings)
    before = cut = 0
    for span in whole.spans:
        if span.kind == "risk_point" and len(span.token_ids) > 2 and before + 2 < LONGEST:
            last = engine.generate(prompt, **{**settings, "max_new_tokens": before + 2}).spans[-1]
            given = engine.score([*prompt, *whole.token_ids[:before]], span.token_ids[:2]).spans[0]
            assert last.token_ids == span.token_ids[:2]
            assert (last.f_mlds, last.con_mlds) == near((given.f_mlds, given.con_mlds))
            assert last.log_prob == pytest.approx(sum(last.token_log_probs))
            assert last.candidates[last.chosen or 0].token_ids == span.token_ids
            cut += 1
        before += len(span.token_ids)
    assert cut


def test_the_context_window_bounds_the_branches_and_not_the_limit() -> None:
    engine = limited("llama", max_position_embeddings=32)
    _, prompt = prompts()
    settings: dict[str, Any] = {"gamma": 0.05, "span_boundary": "fixed", "max_span_tokens": 16}
    passes = record(engine)
    whole = engine.generate(prompt, max_new_tokens=500, **settings)
    assert len(prompt) + len(whole.token_ids) == 32
    assert whole.finish_reason == "length"
    for most in (1, 5, 20):
        assert_only_cut(engine.generate(prompt, max_new_tokens=most, **settings), whole, most=most)
    assert steps(passes)
    fed = [end for span in whole.spans for end in (len(one.token_ids) for one in span.candidates)]
    assert max(fed) <= 16


# --- rules for candidates of unequal length

PROMPT = list(range(20, 32))
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
