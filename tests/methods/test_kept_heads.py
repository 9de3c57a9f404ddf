"""Retrieval heads in the cache directory, and the rank of a source attention without labels."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cocoa_engine import CocoaEngine
from cocoa_engine.cache_directory import CACHE_VARIABLE
from cocoa_engine.errors import ConfigError
from cocoa_engine.methods.retrieval_heads import (
    SOURCE_HEADS,
    RetrievalHeads,
    ScoredHead,
    heads_of_model,
    keep,
    kept_file,
    known_heads,
    source_heads,
    spread_heads,
    spread_heads_of,
)
from cocoa_engine.model.language_model import LanguageModel
from cocoa_engine.model.weight_identity import model_digest
from tests.helpers.alike import near
from tests.helpers.backends import PROMPTS
from tests.helpers.in_threads import join, start
from tests.helpers.rivals import heads_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

SHARES = st.floats(0, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def found_in(model: Any, reference: list[float] | None = None) -> RetrievalHeads:
    scored = [ScoredHead(layer=layer, head=head, score=0.5) for layer, head in heads_of(model)]
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    return RetrievalHeads(
        model_name="m", num_layers=layers, num_heads=heads, samples=1, heads=scored, reference=reference
    )


def test_an_engine_finds_the_heads_that_were_kept() -> None:
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer())
    before = engine.generate(PROMPTS[0], max_new_tokens=4)
    file = keep(found_in(model), engine.session.model)
    assert heads_of_model(None, LanguageModel(model)) == found_in(model)
    after = engine.generate(PROMPTS[0], max_new_tokens=4)
    assert after.spans[0].source_attention != before.spans[0].source_attention
    assert (before.source_heads, after.source_heads) == ("spread", None)
    # a copy of the model has them; another model of the same shape does not
    assert heads_of_model(None, LanguageModel(tiny_model("llama"))) is not None
    assert heads_of_model(None, LanguageModel(tiny_model("llama", seed=1))) is None
    assert [path.suffix for path in file.parent.iterdir() if path.suffix != ".lock"] == [".json"]


def test_a_file_that_was_given_comes_first(tmp_path: Path) -> None:
    model = tiny_model("llama")
    keep(found_in(model), LanguageModel(model))
    given_heads = found_in(model).model_copy(update={"model_name": "given", "heads": found_in(model).heads[:1]})
    file = tmp_path / "given.json"
    file.write_text(given_heads.model_dump_json())
    assert heads_of_model(str(file), LanguageModel(model)) == given_heads


def test_the_digest_is_of_the_weights_not_of_the_dtype() -> None:
    bfloat16 = tiny_model("llama").to(torch.bfloat16)
    assert model_digest(LanguageModel(bfloat16)) == model_digest(LanguageModel(tiny_model("llama")))
    digests = {
        model_digest(LanguageModel(model))
        for model in (
            tiny_model("llama"),
            tiny_model("llama", seed=1),
            tiny_model("qwen3"),
            tiny_model("llama", num_hidden_layers=4),
        )
    }
    assert len(digests) == 4


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"heads": []}'])
def test_a_damaged_file_is_not_used_and_replaced(content: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    file = kept_file(LanguageModel(model))
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert heads_of_model(None, LanguageModel(model)) is None
    assert "is not used" in caplog.text
    keep(found_in(model), LanguageModel(model))
    assert heads_of_model(None, LanguageModel(model)) == found_in(model)


def test_no_reader_sees_half_a_file() -> None:
    model = tiny_model("llama")
    one, other = found_in(model, [0.0] * 4000), found_in(model, [1.0] * 4000)
    language_model = LanguageModel(model)
    file = keep(one, language_model)
    done = threading.Event()

    def write() -> None:
        for number in range(40):
            keep((one, other)[number % 2], language_model)

    writers = [start(write) for _ in range(2)]
    seen = []

    def read() -> None:
        while not done.is_set():
            seen.append(len(json.loads(file.read_text())["reference"]))

    reader = start(read)
    join(writers)
    done.set()
    join([reader])
    assert set(seen) == {4000}
    assert not [*file.parent.glob("*.part")]


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    file = keep(found_in(model), LanguageModel(model))
    before = file.read_text()

    def refuse(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("cocoa_engine.output_files.os.replace", refuse)
    with pytest.raises(OSError, match="disk is full"):
        keep(found_in(model, [0.1, 0.2]), LanguageModel(model))
    assert file.read_text() == before
    assert not [*file.parent.glob("*.part")]


@given(st.lists(SHARES, min_size=2, max_size=30, unique=True))
def test_each_quantile_has_its_level(knots: list[float]) -> None:
    known = sorted(knots)
    heads = ranked(known)
    last = len(known) - 1
    assert [heads.rank(knot) for knot in known] == pytest.approx([1 - number / last for number in range(len(known))])


@given(st.lists(SHARES, min_size=2, max_size=30), SHARES)
def test_the_rank_is_close_to_the_share_of_knots_above(knots: list[float], value: float) -> None:
    known = sorted(knots)
    rank = ranked(known).rank(value)
    assert rank is not None
    above, equal = sum(knot > value for knot in known), sum(knot == value for knot in known)
    last = len(known) - 1
    assert (above - 1) / last - 1e-9 <= rank <= (above + equal) / last + 1e-9


def ranked(reference: list[float] | None) -> RetrievalHeads:
    heads = [ScoredHead(layer=0, head=0, score=1)]
    return RetrievalHeads(model_name="m", num_layers=1, num_heads=1, samples=1, heads=heads, reference=reference)


def test_outside_the_quantiles_and_without_them() -> None:
    heads = ranked([0.2, 0.2, 0.4, 0.8])
    assert heads.rank(0.1) == 1.0
    assert heads.rank(0.9) == 0.0
    assert heads.rank(0.2) == pytest.approx(1 - 0.5 / 3)
    assert heads.rank(0.3) == pytest.approx(1 - 1.5 / 3)
    assert [heads.rank(value) for value in (None, math.nan, math.inf)] == [None] * 3
    assert ranked(None).rank(0.3) is None


@pytest.mark.parametrize("knots", [[0.5], [0.5, 0.4], [-0.1, 0.4], [0.4, 1.1], [0.1, math.nan]])
def test_refused_references(knots: list[float]) -> None:
    with pytest.raises(ValidationError):
        ranked(knots)


def test_the_embedded_model_has_a_reference() -> None:
    heads = known_heads(None, 30, 9)
    assert heads is not None
    assert heads.reference is not None
    assert len(heads.reference) == 101
    assert heads.reference_spans >= 200
    assert heads.reference == sorted(heads.reference)
    ranks = [heads.rank(value / 20) for value in range(21)]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] == 1.0
    assert ranks[-1] == 0.0


def test_spread_heads_are_in_the_layers_after_the_middle() -> None:
    heads = spread_heads("m", 30, 9)
    assert len(heads.best(SOURCE_HEADS)) == len(set(heads.best(SOURCE_HEADS))) == 20
    assert {layer for layer, _ in heads.best(20)} == {*range(15, 25)}
    assert len({head for _, head in heads.best(20)}) >= 8
    for layers, count in ((1, 1), (2, 1), (3, 4), (6, 4), (80, 64)):
        spread = spread_heads("m", layers, count).best(SOURCE_HEADS)
        assert 1 <= len(spread) == len(set(spread)) <= 20
        assert all(layer >= layers // 2 for layer, _ in spread)


def test_models_without_known_heads_have_the_source_attention_of_spread_heads() -> None:
    model = tiny_model("llama")
    engine = CocoaEngine(model, tiny_tokenizer())
    decoded, given = engine.generate(PROMPTS[0], max_new_tokens=4), engine.score(PROMPTS[0], "abc")
    spread = spread_heads_of(LanguageModel(model))
    assert spread is not None
    assert source_heads(None, LanguageModel(model)) == spread.best(SOURCE_HEADS)
    with pytest.raises(ConfigError, match="retrieval heads"):
        engine.generate(PROMPTS[0], method="decore")
    keep(spread, engine.session.model)  # what `cocoa heads --spread --prompts 0` writes
    for answer, kept in (
        (decoded, engine.generate(PROMPTS[0], max_new_tokens=4)),
        (given, engine.score(PROMPTS[0], "abc")),
    ):
        assert answer.spans[0].source_attention is not None
        assert answer.spans[0].token_source_attention == near(kept.spans[0].token_source_attention)
        assert answer.source_heads == kept.source_heads == "spread"
        assert answer.risk_source == "token_probability"
    named = engine.generate("ab cd ef", max_new_tokens=4, source=[(0, 2)])
    assert named.risk_source == "token_probability"  # there is no reference distribution of these heads
    assert named.spans[0].passage_attention
    with pytest.raises(ConfigError, match="reference distribution"):
        engine.generate(PROMPTS[0], risk="source_attention")


def test_spread_heads_are_in_layers_that_attend_to_the_whole_prompt() -> None:
    model = LanguageModel(tiny_model("llama"))
    layers = model.num_layers
    model.config.layer_types = ["full_attention", *["sliding_attention"] * (layers - 1)]
    found = spread_heads_of(model)
    assert found is not None
    assert {one.layer for one in found.heads} == {0}  # no other layer sees all of it
    model.config.layer_types = ["linear_attention"] * layers
    assert spread_heads_of(model) is None
    assert source_heads(None, model) == ()
    assert {one.layer for one in spread_heads("m", 30, 9, attending=range(3, 30, 4)).heads} == {15, 19, 23}
