"""Invented passages, the labelled set that a model makes itself of them, and the reference of its source attention."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from cocoa_engine import CocoaConfig, CocoaEngine, FitSettings, fit_self_made
from cocoa_engine.cache_directory import CACHE_VARIABLE
from cocoa_engine.errors import CalibrationError, UnsupportedModelError
from cocoa_engine.lab import fit
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab.forced import force
from cocoa_engine.lab.heads import KNOTS, PROMPTS, keep_reference, with_reference
from cocoa_engine.lab.measured import labelled_features
from cocoa_engine.lab.self_made import (
    STATED,
    MadeQuestion,
    made_questions,
    passages,
    planted_errors,
    self_made_features,
)
from cocoa_engine.methods.retrieval_heads import (
    SOURCE_HEADS,
    RetrievalHeads,
    heads_of_model,
    source_heads,
    spread_heads_of,
)
from cocoa_engine.risk.features import answer_features
from tests.helpers.backends import made
from tests.helpers.engines import engine_of
from tests.helpers.inside import use_backend
from tests.helpers.rivals import heads_file, heads_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

DOCUMENT = (
    "The old mill in Harrowgate was built by John Smith in 1850. It has 14 floors and a tower. In summer, the owner "
    "Clara Voss opens it to visitors. The mill burned on 3 March 1902."
)


def test_a_passage_states_some_facts_and_not_the_others() -> None:
    drawn = list(islice(passages(3), 300))
    for passage in drawn:
        assert len(passage.stated) == STATED
        assert passage.missing
        assert "{" not in passage.text
        for fact in passage.stated:
            assert fact.sentence in passage.text
            assert fact.answers[0].lower() in fact.sentence.lower()
            assert fact.question.endswith("?")
        for fact in passage.missing:
            assert fact.sentence not in passage.text
            if len(fact.answers[0]) > 6:  # small numbers may occur in another fact
                assert fact.answers[0] not in passage.text
    assert len({passage.text for passage in drawn}) == 300
    assert len({passage.stated[0].question.split()[0] for passage in drawn}) >= 5


def test_made_questions() -> None:
    made = made_questions(count=60, seed=4)
    assert made == made_questions(count=60, seed=4) != made_questions(count=60, seed=5)
    assert (len(made), sum(one.answerable for one in made)) == (60, 40)
    for one in made:
        assert one.context in one.request
        assert one.text in one.request
        assert not one.answerable or one.is_right(one.context)
    assert len({one.request.replace(one.context, "")[:20] for one in made}) >= 3  # several wordings


def test_questions_about_documents() -> None:
    made = [one for one in made_questions([DOCUMENT], count=8) if one.group.startswith("document")]
    assert {one.answerable for one in made} == {True, False}
    for one in made:
        (term,) = one.answers
        assert term in DOCUMENT
        assert "____" in one.text
        assert term not in one.text
        assert (term in one.context) is one.answerable
    with pytest.raises(CalibrationError, match="no sentence with a name"):
        made_questions(["nothing here. nor there."], count=8)


def mill_question(*answers: str, answerable: bool = True) -> MadeQuestion:
    return MadeQuestion("Who built the mill of Odd?", "x", answers, "g", answerable)


@pytest.mark.parametrize(
    ("answer", "right", "right_if_missing"),
    [
        ("It was built by Mirela Voss.", True, True),
        ("It was Voss.", True, True),
        ("It was built by Pavel Lund.", False, False),
        ("The text does not say.", False, True),
        ("It is not mentioned in the passage.", False, True),
        ("There is no information about the mayor.", False, True),
        ("I cannot answer this.", False, True),
        ("The passage doesn't specify it.", False, True),
        ("unknown", False, True),
        ("It is known for its clocks.", False, False),
        ("She was not born in Rome.", False, False),
        ("", False, False),
    ],
)
def test_a_right_answer_is_known_or_declines(answer: str, right: bool, right_if_missing: bool) -> None:
    assert mill_question("Mirela Voss", "Voss").is_right(answer) is right
    assert mill_question("Mirela Voss", "Voss", answerable=False).is_right(answer) is right_if_missing


def test_planted_errors() -> None:
    texts = planted_errors(200, seed=2)
    assert texts == planted_errors(200, seed=2) != planted_errors(200, seed=3)
    planted = clean = 0
    for one, passage in zip(texts, passages(2), strict=False):
        assert one.source == passage.text
        assert one.source in one.prompt
        assert one.source in one.question
        stated = {fact.answers[0].lower() for fact in passage.stated}
        for span in one.spans:
            value = one.text[span.start : span.end].lower()
            assert value.strip() == value != ""
            planted += 1
            if len(value) > 6:
                assert value not in stated
                assert value not in passage.text.lower()
        marked = "".join("#" if any(s.start <= n < s.end for s in one.spans) else c for n, c in enumerate(one.text))
        clean += sum(value in marked.lower() for value in stated)
        assert "{" not in one.text
    assert planted == pytest.approx(0.4 * 800, rel=0.15)
    assert clean >= 0.55 * 800


def test_features_are_those_of_the_answers_and_of_the_texts() -> None:
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer())
    with pytest.raises(CalibrationError):  # no answer of this model is right
        fit_self_made(engine, count=6, config=CocoaConfig(max_new_tokens=4))
    config = CocoaConfig(max_new_tokens=12, max_risk=0.1, max_candidates=2)
    questions = made_questions(count=4)
    done: list[int] = []
    found = self_made_features(engine, questions, config, seed=5, advance=done.append)
    assert sum(done) == 4
    answers = [engine.generate(f"{one.request}\nAnswer:", config=config.replace(max_risk=None)) for one in questions]
    known = len(found["answer"].names)  # the tiny model has no known heads, hence no source attention
    of_answers = np.array([answer_features(one)[:known] for one in answers])
    assert np.allclose(found["answer"].features, of_answers, atol=1e-3)
    wrong = [not one.is_right(answer.text) for one, answer in zip(questions, answers, strict=True)]
    assert found["answer"].labels.tolist() == wrong
    expected = labelled_features(force(engine, planted_errors(2, seed=5), config), config, 6)["span"]
    assert np.allclose(found["span"].features, expected.features, atol=1e-3)
    assert found["span"].labels.tolist() == expected.labels.tolist()


@pytest.mark.slow
def test_fitting_on_the_models_own_answers(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real model: the set has answers of both classes, and its risk is in [0, 1]."""
    monkeypatch.setattr(fit, "MAX_REPEATS", 1)
    config, settings = CocoaConfig(max_new_tokens=10), FitSettings(draws=20, folds=2)
    fitted = fit_self_made(engine, count=30, config=config, settings=settings)
    assert 0 < fitted.answer.validation.hallucinated < fitted.answer.validation.items == 30
    assert "made by the model itself" in fitted.answer.data
    assert "planted errors" in fitted.span.data
    assert fitted.model_name == engine.model_name
    answer = engine.with_calibrator(fitted).generate("Question: Who wrote Dune?\nAnswer:", max_new_tokens=10)
    assert 0 <= answer.answer_risk <= 1


# --- the reference distribution of a model's source attention


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
    assert file.is_relative_to(tmp_path)
    model = engine.session.model
    assert heads_of_model(None, model).reference is not None
    assert source_heads(None, model) == spread_heads_of(model).best(SOURCE_HEADS)  # type: ignore[union-attr]
    assert keep_reference(engine) is None  # it is known now
    assert keep_reference(engine_of(tiny_model("mamba"))) is None
