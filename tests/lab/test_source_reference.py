"""Invented passages, and the reference distribution of a model's source attention."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from cocoa_engine import CocoaEngine
from cocoa_engine.cache_directory import CACHE_VARIABLE
from cocoa_engine.errors import UnsupportedModelError
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.heads import KNOTS, PROMPTS, keep_reference, with_reference
from cocoa_engine.lab.self_made import STATED, passages
from cocoa_engine.methods.retrieval_heads import (
    SOURCE_HEADS,
    RetrievalHeads,
    heads_of_model,
    source_heads,
    spread_heads_of,
)
from tests.helpers.backends import made
from tests.helpers.engines import engine_of
from tests.helpers.inside import use_backend
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


def test_a_passage_states_some_facts_and_not_the_others() -> None:
    drawn = list(islice(passages(3), 300))
    for passage in drawn:
        assert len(passage.stated) == STATED
        assert passage.missing
        for fact in passage.stated:
            assert fact.sentence in passage.text
            assert fact.answers[0].lower() in fact.sentence.lower()
            assert fact.question.endswith("?")
        for fact in passage.missing:
            assert fact.sentence not in passage.text
            if len(fact.answers[0]) > 6:  # small numbers may occur in another fact
                assert fact.answers[0] not in passage.text
        assert "{" not in passage.text
    assert len({passage.text for passage in drawn}) == 300
    assert len({passage.stated[0].question.split()[0] for passage in drawn}) >= 5


def tiny(folder: Path, kind: str = "lean") -> tuple[CocoaEngine, RetrievalHeads]:
    model = tiny_model("llama", max_position_embeddings=2048)
    engine = use_backend(CocoaEngine(model, tiny_tokenizer()), made(model, kind, "stock"))
    heads = heads_file(folder, model.config.num_hidden_layers, model.config.num_attention_heads, heads_of(model))
    return engine, RetrievalHeads.model_validate_json(Path(heads).read_text())


@pytest.mark.slow
def test_the_reference_is_that_of_the_models_own_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 5)
    engine, heads = tiny(tmp_path)
    done: list[tuple[int, int]] = []
    found = with_reference(engine, heads, prompts=4, on_progress=lambda *at: done.append(at))
    assert done[-1] == (4, 4)
    assert found.heads == heads.heads
    assert found.reference is not None
    assert len(found.reference) == KNOTS
    file = tmp_path / "heads.json"
    file.write_text(heads.model_dump_json())
    values = []
    for number, passage in enumerate(islice(passages(0), 4)):
        task = "Answer the question from the passage, in one sentence."
        prompt = f"{passage.text}\n\nSummarise the text in two sentences."
        if number % 2:
            prompt = f"Passage: {passage.text}\n\n{task}\nQuestion: {passage.stated[0].question}"
        answer = engine.generate(f"{prompt}\nAnswer:", max_new_tokens=48, decore_heads=str(file))
        values += [span.source_attention for span in answer.spans if any(map(str.isalnum, span.text))]
    assert found.reference_spans == len(values)
    assert found.reference == pytest.approx(np.quantile(values, np.linspace(0, 1, KNOTS)), abs=1e-3)  # type: ignore[arg-type]
    ranks = [found.rank(value) for value in values]
    assert np.mean(ranks) == pytest.approx(0.5, abs=0.05)  # type: ignore[arg-type]


def test_too_few_spans_and_their_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's attention is code of its own, and cannot be seen."""
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 1000)
    engine, heads = tiny(tmp_path)
    for asked, message in (
        (engine_of(tiny_model("falcon")), r"wrote 0 spans with a known .* may not be visible"),
        (engine, r"at least 1000 are needed\. Take more prompts \(60 by default\)\."),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            with_reference(asked, heads, prompts=1)


@pytest.mark.slow
def test_a_reference_is_kept_for_models_that_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 5)
    monkeypatch.setattr(lab_heads, "MAX_NEW_TOKENS", 4)
    engine = tiny(tmp_path)[0]
    done: list[tuple[int, int]] = []
    file = keep_reference(engine, on_progress=lambda *at: done.append(at))
    assert done[-1] == (PROMPTS, PROMPTS)
    assert file is not None
    assert file.is_relative_to(tmp_path)
    model = engine.session.model
    assert heads_of_model(None, model).reference is not None
    assert source_heads(None, model) == spread_heads_of(model).best(SOURCE_HEADS)  # type: ignore[union-attr]
    assert keep_reference(engine) is None  # it is known now
    assert keep_reference(engine_of(tiny_model("mamba"))) is None
