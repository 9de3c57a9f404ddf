"""The labelled set that a model makes itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cocoa_engine import CocoaConfig, CocoaEngine, FitSettings, fit_self_made
from cocoa_engine.errors import CalibrationError
from cocoa_engine.lab import fit
from cocoa_engine.lab.forced import force
from cocoa_engine.lab.measured import labelled_features
from cocoa_engine.lab.self_made import (
    MadeQuestion,
    made_questions,
    passages,
    planted_errors,
    self_made_features,
)
from cocoa_engine.risk.features import answer_features
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

DOCUMENT = (
    "The old mill in Harrowgate was built by John Smith in 1850. It has 14 floors and a tower. In summer, the owner "
    "Clara Voss opens it to visitors. The mill burned on 3 March 1902."
)


def test_declining() -> None:
    question = made(["a known answer"], answerable=False)
    for answer in (
        "The text does not say.",
        "It is not mentioned in the passage.",
        "There is no information about the mayor.",
        "I cannot answer this.",
        "The passage doesn't specify it.",
        "unknown",
    ):
        assert question.is_right(answer), answer
    for answer in ("Paris.", "It is known for its clocks.", "She was not born in Rome.", ""):
        assert not question.is_right(answer), answer


def test_made_questions() -> None:
    made = made_questions(count=60, seed=4)
    assert len(made) == 60
    assert made == made_questions(count=60, seed=4)
    assert made != made_questions(count=60, seed=5)
    assert sum(one.answerable for one in made) == 40
    for one in made:
        assert one.context is not None
        assert one.context in one.request
        assert one.text in one.request
        assert one.answerable is False or one.is_right(one.context)
    assert len({one.request.replace(one.context or "", "")[:20] for one in made}) >= 3  # several wordings


def test_questions_about_documents() -> None:
    made = [one for one in made_questions([DOCUMENT], count=8) if one.group.startswith("document")]
    assert {one.answerable for one in made} == {True, False}
    for one in made:
        (term,) = one.answers
        assert term in DOCUMENT
        assert "____" in one.text
        assert term not in one.text
        assert (term in (one.context or "")) is one.answerable
    with pytest.raises(CalibrationError, match="no sentence with a name"):
        made_questions(["nothing here. nor there."], count=8)


def made(answers: Sequence[str], *, answerable: bool = True) -> MadeQuestion:
    return MadeQuestion("Who built the mill of Odd?", "x", tuple(answers), "g", answerable)


def test_labels() -> None:
    known = made(["Mirela Voss", "Voss"])
    assert known.is_right("It was built by Mirela Voss.")
    assert not known.is_right("It was built by Pavel Lund.")
    assert not known.is_right("The text does not say.")
    missing = made(["Voss"], answerable=False)
    assert missing.is_right("The text does not say.")
    assert missing.is_right("It was Voss.")
    assert not missing.is_right("It was built by Pavel Lund.")


def test_planted_errors() -> None:
    texts = planted_errors(200, seed=2)
    assert texts == planted_errors(200, seed=2)
    assert texts != planted_errors(200, seed=3)
    planted = clean = 0
    for one, passage in zip(texts, passages(2), strict=False):
        assert one.source == passage.text
        assert one.source in one.prompt
        assert one.source in one.question
        stated = {fact.answers[0].lower() for fact in passage.stated}
        assert one.spans is not None
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
    config = CocoaConfig(max_new_tokens=12, max_risk=0.1, max_candidates=2)
    questions = made_questions(count=4)
    done: list[int] = []
    found = self_made_features(engine, questions, config, seed=5, advance=done.append)
    assert sum(done) == 4
    answers = [engine.generate(f"{one.request}\nAnswer:", config=config.replace(max_risk=None)) for one in questions]
    known = len(found["answer"].names)  # the tiny model has no known heads, hence no source attention
    of_answers = np.array([answer_features(one)[:known] for one in answers])
    assert np.allclose(found["answer"].features, of_answers, atol=1e-3)
    assert found["answer"].labels.tolist() == [
        not one.is_right(answer.text) for one, answer in zip(questions, answers, strict=True)
    ]
    texts = planted_errors(2, seed=5)
    forced = force(engine, texts, config)
    expected = labelled_features(forced, config, 6)["span"]
    assert np.allclose(found["span"].features, expected.features, atol=1e-3)
    assert found["span"].labels.tolist() == expected.labels.tolist()


def test_a_model_without_right_answers_is_refused() -> None:
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer())
    with pytest.raises(CalibrationError):
        fit_self_made(engine, count=6, config=CocoaConfig(max_new_tokens=4))


@pytest.mark.slow
def test_fitting_on_the_models_own_answers(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real model: the set has answers of both classes, and its risk is in [0, 1]."""
    monkeypatch.setattr(fit, "MAX_REPEATS", 1)
    fitted = fit_self_made(
        engine, count=30, config=CocoaConfig(max_new_tokens=10), settings=FitSettings(draws=20, folds=2)
    )
    assert fitted.answer is not None
    assert 0 < fitted.answer.validation.hallucinated < fitted.answer.validation.items == 30
    assert "made by the model itself" in fitted.answer.data
    assert fitted.span is not None
    assert "planted errors" in fitted.span.data
    assert fitted.model_name == engine.model_name
    answer = engine.with_calibrator(fitted).generate("Question: Who wrote Dune?\nAnswer:", max_new_tokens=10)
    assert answer.answer_risk is not None
    assert 0 <= answer.answer_risk <= 1
