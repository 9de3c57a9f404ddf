"""Prompts that are too short for a passage have a risk of answers of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocoa_engine import CalibrationError, CocoaConfig, CocoaEngine, RiskCalibrator
from cocoa_engine.model.prompts import ChatTokens
from cocoa_engine.spans import CLOSED_BOOK_TOKENS
from tests.helpers.made_up_risk import fitted, labelled_items, risk
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

CONFIG = CocoaConfig(max_new_tokens=6, middle_layers=(0, 1))
PROMPTS = {"short": [5] * CLOSED_BOOK_TOKENS, "long": [5] * (CLOSED_BOOK_TOKENS + 1)}


@pytest.fixture(scope="module")
def calibrator() -> RiskCalibrator:
    settings = fitted().settings.model_copy(update={"middle_layers": CONFIG.middle_layers})
    known = fitted(model_name="tiny", settings=settings, levels=("span", "answer"))
    short = risk(labelled_items(level="answer", seed=5), data="short questions", threshold=("specificity", 0.8))
    return known.model_copy(update={"closed_book": short})


@pytest.mark.slow
def test_the_length_of_the_prompt_decides(calibrator: RiskCalibrator) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer(), model_name="tiny", config=CONFIG, calibrator=calibrator)
    plain = calibrator.model_copy(update={"closed_book": None})
    short = calibrator.closed_book.threshold.value
    for name, data, threshold in (("short", "short questions", short), ("long", "made up", 0.5)):
        with pytest.warns(UserWarning, match="out_of_domain") if name == "short" else pytest.MonkeyPatch.context():
            answer = engine.generate(PROMPTS[name])
        assert (answer.calibrated_on, answer.answer_threshold) == (data, threshold)
        assert answer.answer_risk == calibrator.answer_risk(answer)
        assert (answer.answer_risk == plain.answer_risk(answer)) == (name == "long")
        assert calibrator.for_answer(answer).data == data


def test_a_named_passage_is_one_however_short(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = heads_file(tmp_path, model.config.num_hidden_layers, model.config.num_attention_heads, [(1, 0)])
    engine = CocoaEngine(model, tiny_tokenizer(), config=CONFIG.replace(decore_heads=heads))
    assert engine.generate("abcd efgh ijkl").closed_book
    assert not engine.generate("abcd efgh ijkl", source=[(0, 4)]).closed_book


HISTORY = [
    {"role": "user", "content": "I want to practise for a quiz. Will you help me?"},
    {"role": "assistant", "content": "Of course. Ask me what you like, and I will answer. " * 4},
]
QUESTION = {"role": "user", "content": "What is the capital of France?"}
PASSAGE = {"role": "user", "content": " ".join(f"The {n}th street of the town is called Elm {n}." for n in range(12))}


def test_the_history_of_a_chat_is_no_passage_but_may_hold_one(engine: CocoaEngine) -> None:
    short = engine.encode_chat([QUESTION])
    assert type(short) is list
    asked = engine.encode_chat([*HISTORY, QUESTION])
    assert isinstance(asked, ChatTokens)
    assert len(asked) > CLOSED_BOOK_TOKENS
    assert asked.question_tokens == len(engine.encode_chat([HISTORY[0]]))  # the longer of the two of the user
    answer = engine.generate(asked, max_new_tokens=8)
    assert answer.question_tokens == asked.question_tokens
    assert answer.closed_book
    same = engine.chat([*HISTORY, QUESTION], max_new_tokens=8)
    for name in ("text", "question_tokens", "calibrated_on"):
        assert getattr(same, name) == getattr(answer, name)
    assert engine.score(asked, answer.text).closed_book
    assert "short questions" in str(answer.calibrated_on)
    assert not engine.generate(list(asked), max_new_tokens=8).closed_book  # bare ids do not tell
    system = {**PASSAGE, "role": "system"}
    for chat in ([PASSAGE, HISTORY[1], QUESTION], [system, *HISTORY, QUESTION], [*HISTORY, PASSAGE]):
        assert not engine.chat(chat, max_new_tokens=4).closed_book


@pytest.mark.slow
def test_it_is_stored_and_left_out_with_the_risk_of_answers(calibrator: RiskCalibrator) -> None:
    assert RiskCalibrator.model_validate_json(calibrator.model_dump_json()) == calibrator
    spans = calibrator.spans_only()
    assert spans is not None
    assert (spans.answer, spans.closed_book) == (None, None)
    with pytest.raises(CalibrationError, match="none of other answers"):
        RiskCalibrator(**{**calibrator.model_dump(), "answer": None})


def test_the_embedded_one_knows_an_easy_question_from_a_hard_one(engine: CocoaEngine) -> None:
    easy, hard = (
        engine.chat([{"role": "user", "content": question}], max_new_tokens=32)
        for question in ("What is the capital of France?", "Who wrote Dune?")
    )
    assert "Paris" in easy.text
    assert "Herbert" not in hard.text
    assert easy.answer_risk < 0.5 < hard.answer_risk
    assert "short questions" in str(easy.calibrated_on)
    passage = "Question: " + " ".join(f"The {n}th street of the town is called Elm {n}." for n in range(12))
    assert "NQ-Swap" in str(engine.chat([{"role": "user", "content": passage}], max_new_tokens=8).calibrated_on)
