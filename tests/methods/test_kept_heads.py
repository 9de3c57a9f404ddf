"""Retrieval heads in the cache directory, and the rank of a source attention without labels."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cocoa_engine import CocoaEngine, Generation
from cocoa_engine.equations import answer_surprisal, distribution
from cocoa_engine.errors import ConfigError
from cocoa_engine.files import CACHE_VARIABLE
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.data import Question
from cocoa_engine.lab.heads import with_right_answers
from cocoa_engine.lab.measured import EXAMPLES
from cocoa_engine.methods import retrieval_heads
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.weight_identity import model_digest
from cocoa_engine.rendering.wording import verdict
from cocoa_engine.report import RiskReport
from cocoa_engine.risk.policy import right_answers_of
from tests.helpers.alike import near
from tests.helpers.backends import PROMPTS
from tests.helpers.rivals import heads_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

SHARES = st.floats(0, 1)
MODEL = LanguageModel(tiny_model("llama"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def found_in(model: LanguageModel, reference: list[float] | None = None) -> retrieval_heads.RetrievalHeads:
    scored = [retrieval_heads.ScoredHead(layer=layer, head=head, score=0.5) for layer, head in heads_of(model.model)]
    shape = {"num_layers": model.num_layers, "num_heads": model.config.num_attention_heads}
    return retrieval_heads.RetrievalHeads(model_name="m", samples=1, heads=scored, reference=reference, **shape)


@given(st.lists(st.floats(0, 50), min_size=2, max_size=30).map(sorted), st.floats(-1, 60), st.floats(-1, 60))
def test_a_distribution_rises_from_0_to_1(quantiles: list[float], value: float, other: float) -> None:
    low, high = sorted((value, other))
    assert 0 <= distribution(quantiles, low) <= distribution(quantiles, high) <= 1
    assert distribution(quantiles, quantiles[0] - 1) == 0
    assert distribution(quantiles, quantiles[-1] + 1) == 1
    assert math.isnan(distribution(quantiles, math.nan))


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=60))
def test_tokens_beyond_the_24th_do_not_make_an_answer_surprising(log_probs: list[float]) -> None:
    surprisal = answer_surprisal(log_probs)
    assert surprisal == pytest.approx(-np.mean(log_probs) * min(len(log_probs), 24), abs=1e-9)
    assert answer_surprisal(log_probs * 24) == pytest.approx(-np.mean(log_probs) * 24, abs=1e-6)


def test_own_right_answers_are_used_before_those_of_other_models() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    model, general = engine.session.model, right_answers_of(None)
    before = engine.generate(PROMPTS[0], max_new_tokens=4)
    assert (before.answer_risk_source, before.calibrated_on) == ("rank", general.of)
    assert (before.threshold, before.answer_threshold) == (general.span_threshold, 0.9)
    log_probs = [log_prob for span in before.spans for log_prob in span.token_log_probs]
    surprisal = answer_surprisal(log_probs)
    own = retrieval_heads.RightAnswers(of="m", surprisals=[0, 2 * surprisal], span_threshold=1e-9)
    retrieval_heads.keep(found_in(model).model_copy(update={"right_answers": own}), model)
    after = engine.generate(PROMPTS[0], max_new_tokens=4)
    assert (after.calibrated_on, after.threshold) == ("m", own.span_threshold)
    assert after.answer_risk == pytest.approx(0.5)
    assert all(span.flagged for span in after.spans)
    assert engine.rated(after) == after
    long = engine.generate(PROMPTS[0], max_new_tokens=48)
    for spans in (long.spans[:8], long.spans):
        answer = engine.rated(long.model_copy(update={"spans": spans}))
        assert answer.answer_risk == own.rank([value for span in spans for value in span.token_log_probs])
        tokens = sum(len(span.token_ids) for span in spans)
        assert answer.answer_out_of_domain == RiskReport.of(answer).answer_out_of_domain == (tokens > 24)
        assert ("longer than those" in verdict(answer)) == (tokens > 24)
    assert engine.score(PROMPTS[0], "a thing").answer_risk is None
    assert engine.without_answer_risk().generate(PROMPTS[0], max_new_tokens=4).answer_risk is None
    assert Generation.model_validate_json(after.model_dump_json()) == after


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_model_measures_its_right_answers(
    engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    """Without a chat template the first line is the answer: the model goes on with questions of its own."""
    if not is_chat:
        tokenizer = copy.deepcopy(engine.tokenizer)
        tokenizer.chat_template = None
        engine = CocoaEngine(engine.model, tokenizer)
    monkeypatch.setattr(lab_heads, "MIN_RIGHT", 2)
    monkeypatch.setattr(lab_heads, "ANSWERED", 12)
    heads = retrieval_heads.heads_of_model(None, engine.session.model)
    done: list[int] = []
    measured = with_right_answers(engine, heads, questions=5, advance=done.append)
    own = measured.right_answers
    assert sum(done) == 5
    assert (own.of, measured.heads, measured.reference) == (engine.model_name, heads.heads, heads.reference)
    asked = [Question(text, None, tuple(known), text) for text, *known in lab_heads.SHORT[:5]]
    if is_chat:
        prompts = [engine.encode_chat([{"role": "user", "content": question.text}]) for question in asked]
    else:
        prompts = [engine.encode(f"{EXAMPLES}{question.text}\nAnswer:") for question in asked]
    answers = engine.generate_batch(prompts, max_new_tokens=lab_heads.ANSWERED, stop=() if is_chat else ("\n",))
    right = [answer for answer, question in zip(answers, asked, strict=True) if question.is_right(answer.text)]
    ranks = [own.rank([value for span in answer.spans for value in span.token_log_probs]) for answer in right]
    assert min(ranks) == pytest.approx(0, abs=0.01)
    assert max(ranks) == pytest.approx(1, abs=0.01)
    monkeypatch.setattr(lab_heads, "MIN_RIGHT", 10)
    assert with_right_answers(engine, heads, questions=2) == heads  # too few


def test_an_engine_finds_the_heads_that_were_kept(tmp_path: Path) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    model = engine.session.model
    before = engine.generate(PROMPTS[0], max_new_tokens=4)
    file = retrieval_heads.keep(found_in(model), model)
    assert retrieval_heads.heads_of_model(None, model) == found_in(model)
    after = engine.generate(PROMPTS[0], max_new_tokens=4)
    assert after.spans[0].source_attention != before.spans[0].source_attention
    assert (before.source_heads, after.source_heads) == ("spread", None)
    # a copy of the model has them; another model of the same shape does not
    assert retrieval_heads.heads_of_model(None, MODEL) is not None
    assert retrieval_heads.heads_of_model(None, LanguageModel(tiny_model("llama", seed=1))) is None
    assert [path.suffix for path in file.parent.iterdir() if path.suffix != ".lock"] == [".json"]
    # a file that was given comes first
    other = found_in(model).model_copy(update={"model_name": "given", "heads": found_in(model).heads[:1]})
    (tmp_path / "given.json").write_text(other.model_dump_json())
    assert retrieval_heads.heads_of_model(str(tmp_path / "given.json"), model) == other


def test_the_digest_is_of_the_weights_not_of_the_dtype() -> None:
    assert model_digest(LanguageModel(tiny_model("llama").to(torch.bfloat16))) == model_digest(MODEL)
    others = tiny_model("llama", seed=1), tiny_model("qwen3"), tiny_model("llama", num_hidden_layers=4)
    assert len({model_digest(MODEL), *(model_digest(LanguageModel(model)) for model in others)}) == 4


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"heads": []}', "\xff", "of others"])
def test_a_file_that_cannot_be_used_is_told_once_and_replaced(content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = retrieval_heads.kept_file(MODEL)
    file.parent.mkdir(parents=True)
    file.write_text(content, encoding="latin-1")
    file.chmod(0o666 if content == "of others" else 0o644)
    for _ in range(2):
        CocoaEngine(MODEL.model, tiny_tokenizer()).generate(PROMPTS[0], max_new_tokens=2)
        assert retrieval_heads.heads_of_model(None, MODEL) is None
    assert caplog.text.count("not used") == 1
    retrieval_heads.keep(found_in(MODEL), MODEL)
    assert retrieval_heads.heads_of_model(None, MODEL) == found_in(MODEL)


@given(st.lists(SHARES, min_size=2, max_size=30), SHARES)
def test_the_rank_is_close_to_the_share_of_knots_above(knots: list[float], value: float) -> None:
    knots.sort()
    rank, last = found_in(MODEL, knots).rank(value), len(knots) - 1
    assert rank is not None
    above, equal = sum(knot > value for knot in knots), sum(knot == value for knot in knots)
    assert (above - 1) / last - 1e-9 <= rank <= (above + equal) / last + 1e-9
    if len({*knots}) == len(knots):
        levels = [1 - number / last for number in range(len(knots))]
        assert [found_in(MODEL, knots).rank(knot) for knot in knots] == pytest.approx(levels)


def test_outside_the_quantiles_without_them_and_of_what_is_no_distribution() -> None:
    heads = found_in(MODEL, [0.2, 0.2, 0.4, 0.8])
    assert [heads.rank(value) for value in (0.1, 0.9)] == [1.0, 0.0]
    assert heads.rank(0.2) == pytest.approx(1 - 0.5 / 3)
    assert heads.rank(0.3) == pytest.approx(1 - 1.5 / 3)
    assert [heads.rank(value) for value in (None, math.nan, math.inf)] == [None] * 3
    assert found_in(MODEL).rank(0.3) is None
    for knots in ([0.5], [0.5, 0.4], [-0.1, 0.4], [0.4, 1.1], [0.1, math.nan]):
        with pytest.raises(ValidationError):
            found_in(MODEL, knots)
    for quantiles in ([1.0, 0.5], [0.0, math.inf], [1.0], []):
        with pytest.raises(ValidationError):
            retrieval_heads.RightAnswers(of="m", surprisals=quantiles, span_threshold=0.5)


def best_spread(num_layers: int, num_heads: int, kinds: list[str] | None = None) -> tuple[tuple[int, int], ...]:
    config = SimpleNamespace(layer_types=kinds, name_or_path="m")
    shaped: Any = SimpleNamespace(num_layers=num_layers, num_heads=num_heads, config=config, is_divided=False)
    heads = retrieval_heads.spread_heads_of(shaped)
    return () if heads is None else heads.best(retrieval_heads.SOURCE_HEADS)


def test_the_embedded_model_has_a_reference(engine: CocoaEngine) -> None:
    heads = retrieval_heads.heads_of_model(None, engine.session.model)
    assert heads is not None
    assert heads.reference is not None
    assert (heads.num_layers, heads.num_heads, len(heads.reference)) == (30, 9, 101)
    assert len(set(heads.best(retrieval_heads.SOURCE_HEADS))) == retrieval_heads.SOURCE_HEADS
    assert heads.reference_spans >= 200
    assert heads.reference == sorted(heads.reference)
    ranks = [heads.rank(value / 20) for value in range(21)]
    assert ranks == sorted(ranks, reverse=True)
    assert (ranks[0], ranks[-1]) == (1.0, 0.0)


def test_spread_heads_are_in_layers_after_the_middle_that_attend_to_the_whole_prompt() -> None:
    heads = best_spread(30, 9)
    assert len(heads) == len(set(heads)) == 20
    assert {layer for layer, _ in heads} == {*range(15, 25)}
    assert len({head for _, head in heads}) >= 8
    for layers, count in ((1, 1), (2, 1), (3, 4), (6, 4), (80, 64)):
        spread = best_spread(layers, count)
        assert 1 <= len(spread) == len(set(spread)) <= 20
        assert all(layer >= layers // 2 for layer, _ in spread)
    kinds = ["full_attention", *["sliding_attention"] * 5]
    assert {layer for layer, _ in best_spread(6, 4, kinds)} == {0}  # no other layer sees all of it
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(30)]
    assert {layer for layer, _ in best_spread(30, 9, kinds)} == {15, 19, 23}
    model = LanguageModel(tiny_model("llama"))
    model.config.layer_types = ["linear_attention"] * model.num_layers
    assert retrieval_heads.spread_heads_of(model) is None
    assert retrieval_heads.source_heads(None, model) == ()


def test_models_without_known_heads_have_the_source_attention_of_spread_heads() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    decoded, given = engine.generate(PROMPTS[0], max_new_tokens=4), engine.score(PROMPTS[0], "abc")
    spread = retrieval_heads.spread_heads_of(engine.session.model)
    assert spread is not None
    assert retrieval_heads.source_heads(None, engine.session.model) == spread.best(retrieval_heads.SOURCE_HEADS)
    with pytest.raises(ConfigError, match="retrieval heads"):
        engine.generate(PROMPTS[0], method="decore")
    retrieval_heads.keep(spread, engine.session.model)  # what `cocoa heads --spread --prompts 0` writes
    again = engine.generate(PROMPTS[0], max_new_tokens=4), engine.score(PROMPTS[0], "abc")
    for answer, kept in zip((decoded, given), again, strict=True):
        assert answer.spans[0].source_attention is not None
        assert answer.spans[0].token_source_attention == near(kept.spans[0].token_source_attention)
        assert answer.source_heads == kept.source_heads == "spread"
        assert answer.risk_source == "token_probability"
    named = engine.generate("ab cd ef", max_new_tokens=4, source=[(3, 5)])
    assert named.risk_source == "token_probability"  # there is no reference distribution of these heads
    for span in named.spans:
        (on_passage,) = span.passage_attention
        assert span.source_attention is not None
        assert 0 < on_passage <= span.source_attention
    with pytest.raises(ConfigError, match="reference distribution"):
        engine.generate(PROMPTS[0], risk="source_attention")
