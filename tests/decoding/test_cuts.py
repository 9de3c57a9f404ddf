"""Where answers end: by stops and ``max_new_tokens``, which only cut, and by rules for candidates of unequal length.

Next-token distributions: entropies, margins, ties, overflow, and ``top_logprobs`` against plain forward passes.
"""

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
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from cocoa_engine import METHODS, CocoaConfig, CocoaEngine, Generation, NonFiniteLogitsError, Runtime
from cocoa_engine.config import MethodName
from cocoa_engine.decoding.next_tokens import next_tokens, row_statistics
from cocoa_engine.execution.backends import KINDS
from tests.helpers.alike import answers, near
from tests.helpers.backends import LINEAR_BACKENDS, made
from tests.helpers.inside import record, steps, use_backend
from tests.helpers.libraries import needs_kernels
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
from tests.helpers.tiny_models import prompt as random_prompt

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
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "river": {"type": "string"}}}
    grammar = engine.constrain(json_schema={**schema, "required": ["city", "river"]})
    free = engine.generate(PROMPTS["json"], max_new_tokens=24, logits_processor=grammar)
    for stop in ('"', '",', "river", free.text[9:13]):
        stopped = engine.generate(PROMPTS["json"], max_new_tokens=24, logits_processor=grammar, stop=stop)
        assert_only_cut(stopped, free, [stop])


LONGEST = 20
BRANCHING: dict[str, Any] = {"max_new_tokens": LONGEST, "gamma": 0.15, "max_span_tokens": 6}
CUT_METHODS = ("greedy", "cocoa", "cocoa-sig", "diver", "dola", "decore")
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(("cocoa-sig", {"span_boundary": boundary}) for boundary in ("left", "own", "fixed")),
    ("cocoa-sig", {"temperature": 2.0, "seed": 3}),
    ("cocoa-sig", {"stop": ("a", "e")}),
    ("cocoa", {"span_log_prob": "end_mean"}),
]
LIMITED = [
    *((architecture, method, {}) for architecture in ("llama", "gemma3_text") for method in CUT_METHODS),
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


NATIVE = [pytest.param(True, marks=needs_kernels), False]


@pytest.mark.slow
@pytest.mark.parametrize("native", NATIVE)
@given(st.data())
def test_they_are_those_of_float64(native: bool, data: st.DataObject) -> None:
    """Also with equal logits and forbidden tokens."""
    pick, seed = data.draw, data.draw(st.integers(0, 1000))
    rows, vocabulary = pick(st.integers(1, 5)), pick(st.integers(1, 400) | st.just(9000))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary + pick(st.integers(0, 20)), generator=generator)[:, :vocabulary]
    logits = logits * pick(st.sampled_from([0.0, 0.3, 3.0, 40.0]))
    logits = (logits.round() if seed % 2 else logits).to(pick(st.sampled_from([torch.float32, torch.bfloat16])))
    hidden = torch.rand(rows, vocabulary, generator=generator) < pick(st.sampled_from([0.0, 0.5, 0.99]))
    hidden[:, seed % vocabulary] = False
    logits.masked_fill_(hidden, -torch.inf)
    exact, count = logits.double().log_softmax(dim=1), pick(st.integers(1, 9))
    tokens = next_tokens(logits, count, native=native)
    assert tokens[:1] == next_tokens(logits[:1], count, native=native)  # to the bit, whatever is beside it
    for each, row, log_probs in zip(tokens, logits.tolist(), exact, strict=True):
        assert each is not None
        allowed = [token_id for token_id in range(vocabulary) if row[token_id] > -math.inf]
        allowed.sort(key=lambda token_id: (-row[token_id], token_id))
        assert list(each.token_ids) == allowed[:count]
        assert each.log_probs == pytest.approx(log_probs[allowed[:count]].tolist(), abs=1e-5)
        kept = log_probs[allowed]
        assert each.entropy == pytest.approx(-(kept.exp() * kept).sum().item(), abs=1e-5)
        assert 0 <= each.entropy <= math.log(vocabulary) + 1e-5
        if count > 1:
            margin = (kept[0] - kept[1]).item() if len(kept) > 1 else math.inf
            assert each.margin == pytest.approx(margin, abs=1e-5)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("lead", [9.0, 14.0, 17.0])
def test_many_improbable_tokens_are_not_lost_beside_a_probable_one(lead: float, native: bool) -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, 4321] = lead
    (found,) = next_tokens(logits, 2, native=native)
    log_probs = logits.double().log_softmax(dim=1)[0]
    assert found is not None
    assert found.log_probs == pytest.approx(log_probs[[4321, 0]].tolist(), abs=3e-6)
    assert found.entropy == pytest.approx(-(log_probs.exp() * log_probs).sum().item(), rel=1e-4)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("vocabulary", [8, 100])
def test_rows_with_one_allowed_token_and_without_any(vocabulary: int, native: bool) -> None:
    logits = torch.full((6, vocabulary), -math.inf)
    logits[0, 7], logits[2, 2], logits[3, 0] = 3.0, math.nan, math.inf
    logits[4:] = torch.randn(2, vocabulary)
    logits[4, -1] = math.nan
    row, *others, good = next_tokens(logits, 2, native=native)
    assert row is not None
    assert (row.token_ids, row.log_probs, row.entropy, row.margin) == ((7,), (0.0,), 0.0, math.inf)
    assert others == [None] * 4
    assert good is not None


def test_a_whole_vocabulary_is_summed_exactly_and_a_near_certain_token_keeps_its_small_entropy() -> None:
    logits = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(2)) * 4
    exact = logits.double().log_softmax(dim=1)
    for layout in (logits, logits.t().contiguous().t()):
        log_sum, entropy = row_statistics(layout, layout.amax(dim=1))
        assert torch.allclose(log_sum.double(), logits.double().logsumexp(dim=1), atol=3e-6, rtol=0)
        assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(dim=1), atol=3e-5, rtol=0)
    _, entropy = row_statistics(torch.tensor([[18.0, 0.0]]), torch.tensor([18.0]))
    p = 1 / (1 + math.exp(18.0))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log1p(-p), rel=0.1)


def test_where_one_token_is_allowed_the_margin_is_infinite_and_survives_json() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    forbidden = torch.tensor([token_id for token_id in range(VOCAB_SIZE) if token_id != 7])
    only_seven = lambda _, scores: scores.index_fill(1, forbidden, -math.inf)  # noqa: E731
    answer = engine.generate([5, 6], logits_processor=only_seven, max_new_tokens=3, top_logprobs=3)
    for name, value in {"token_margins": math.inf, "token_entropies": 0.0, "top_log_probs": [(7, 0.0)]}.items():
        assert [each for span in answer.spans for each in getattr(span, name)] == [value] * 3
    assert Generation.model_validate_json(answer.model_dump_json()) == answer


COPIES = 5
LINEARS = ("native", "stock")


def with_ties() -> Any:
    """A model in which every token has the logit of ``COPIES - 1`` others, with ids far from its own.

    A logit is one number of the last state or its negative: the same in whatever order a processor sums products.
    """
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        one = torch.eye(head.shape[1])
        head.copy_(torch.cat((one, -one))[: VOCAB_SIZE // COPIES].repeat(COPIES, 1))
    model.generation_config.eos_token_id = None
    return model


def tops_of(answer: Generation) -> list[list[tuple[int, float]]]:
    return [top for span in answer.spans for top in span.top_log_probs or ()]


def ids(answer: Generation) -> list[Any]:
    candidates = [[candidate.token_ids for candidate in span.candidates] for span in answer.spans]
    spans = [span.token_ids for span in answer.spans]
    return [spans, candidates, [[token_id for token_id, _ in top] for top in tops_of(answer)]]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_equal_logits_are_ranked_by_id(method: str, tmp_path: Path) -> None:
    model, prompts = with_ties(), [[5, 6, 7], [20, 30, 40, 50]]
    config = config_of(method, model, tmp_path, max_new_tokens=10, top_logprobs=7, max_candidates=3, gamma=0.2)
    native, stock = (CocoaEngine(model, tiny_tokenizer(), runtime=Runtime(linears=each)) for each in LINEARS)
    forbid = [lambda _, scores: scores.index_fill(1, torch.arange(0, VOCAB_SIZE, 2), -torch.inf)]
    for options in ({}, {"logits_processor": forbid}):
        expected = native.generate(prompts[0], config=config, **options)
        answers = stock.generate_batch(prompts, config=config, **options)
        assert ids(answers[0]) == ids(stock.generate(prompts[0], config=config, **options)) == ids(expected)
        if not options and method == "greedy":
            assert max(expected.token_ids) < VOCAB_SIZE // COPIES  # the first of its copies
        for top in tops_of(expected):
            assert top == sorted(top, key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("linears", LINEARS)
def test_equal_logits_of_given_texts_are_ranked_by_id(linears: Any) -> None:
    engine = CocoaEngine(with_ties(), tiny_tokenizer(), runtime=Runtime(linears=linears))
    prompt, texts = [5, 6, 7], [[11, 12, 13], [11, 14, 15, 16]]
    alone = [engine.score(prompt, text, top_logprobs=COPIES + 2) for text in texts]
    together = engine.score(prompt, texts, top_logprobs=COPIES + 2)
    for answer, text in zip([*alone, *together], texts * 2, strict=True):
        assert len(tops_of(answer)) == len(text)
        for top in tops_of(answer):
            highest = [token_id for token_id, _ in top[:COPIES]]
            assert highest == [highest[0] + copy * VOCAB_SIZE // COPIES for copy in range(COPIES)]
            assert [token_id for token_id, _ in top[COPIES:]] == [top[COPIES][0], top[COPIES][0] + VOCAB_SIZE // COPIES]
            assert top == sorted(top, key=lambda pair: (-pair[1], pair[0]))
    assert [*map(ids, alone)] == [*map(ids, together)]


WAYS: list[Any] = [
    (None, None),
    ("lean", LINEAR_BACKENDS[0]),
    *((kind, "stock") for kind in KINDS if kind != "static_lean"),
]


@pytest.mark.parametrize(("kind", "linears"), WAYS)
@pytest.mark.parametrize("part", ["embed_tokens", "down_proj", "v_proj", "gate_proj"])
def test_an_overflow_is_an_error(part: str, kind: str | None, linears: Any) -> None:
    """The states are finite, but their mean square is not: torch's norm makes them 0, and all logits equal."""
    model = tiny_model("llama")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if part in name:
                weight.mul_(1e20)
    engine = CocoaEngine(model, tiny_tokenizer())
    if kind is not None:
        use_backend(engine, made(model, kind, linears))
    for message, call in (
        ("token 5 of the sequence", lambda: engine.generate([5, 6, 7, 20, 30], max_new_tokens=4)),
        ("token 2 of the sequence", lambda: next(engine.stream([5, 6]))),
        ("text to score", lambda: engine.score([5, 6], [7, 8])),
        ("text to score" if kind == "recompute" else "texts to score", lambda: engine.score([5, 6], [[7, 8], [9]])),
    ):
        with pytest.raises(NonFiniteLogitsError, match=message):
            call()


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
    """Of answers alone, streams and batches. Recording changes nothing else."""
    prompts = [random_prompt(seed) for seed in range(3)]
    penalty = options.get("repetition_penalty")
    processors = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty not in (None, 1.0) else []
    plain = engine.generate(prompts[0], **options, max_new_tokens=24)
    assert all(span.top_log_probs is None for span in plain.spans)
    settings = {**options, "max_new_tokens": 24, "top_logprobs": COUNT}
    alone, (streamed,) = engine.generate(prompts[0], **settings), answers(engine.stream(prompts[0], **settings))
    assert plain.token_ids == alone.token_ids == streamed.token_ids
    assert Generation.model_validate_json(alone.model_dump_json()) == alone
    batch = engine.generate_batch(prompts, **settings)
    for prompt, answer in zip([prompts[0], prompts[0], *prompts], [alone, streamed, *batch], strict=True):
        check(engine, prompt, answer, processors)


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
