"""The default calibrator: where it applies, what the pages say of the embedded one, and prompts without a passage."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from cocoa_engine import (
    CalibrationError,
    CalibrationWarning,
    CocoaConfig,
    CocoaEngine,
    RiskCalibrator,
)
from cocoa_engine.model.prompts import ChatTokens
from cocoa_engine.risk import policy
from cocoa_engine.spans import CLOSED_BOOK_TOKENS
from tests.helpers.backends import PROMPTS
from tests.helpers.made_up_risk import fitted, labelled_items, risk
from tests.helpers.paths import README
from tests.helpers.prompts import chat
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

CALIBRATE = README.parent / "docs" / "how-to" / "calibrate.md"
PROMPT = PROMPTS[2]
CONFIG = CocoaConfig(max_new_tokens=8, middle_layers=(0, 1))


def default(monkeypatch: pytest.MonkeyPatch, heads: object = ((1, 0),)) -> tuple[CocoaEngine, RiskCalibrator]:
    """An engine whose default calibrator is one of made-up items, which every real span is far from."""
    settings = fitted().settings.model_copy(update={"middle_layers": CONFIG.middle_layers})
    known = fitted(model_name="tiny", settings=settings, levels=("span", "answer"), source=True, domain=True)
    known = known.model_copy(update={"heads": heads})
    monkeypatch.setattr(policy, "embedded_calibrator", lambda: known)
    return CocoaEngine(tiny_model("llama"), tiny_tokenizer(), model_name="tiny", config=CONFIG), known


@pytest.mark.slow
def test_where_it_applies_it_warns_once_of_what_is_out_of_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    one, known = default(monkeypatch)
    with pytest.warns(CalibrationWarning, match="out_of_domain"):
        generation = one.generate(PROMPT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = one.score(PROMPT, "abcd efgh", divide=True)
        one.generate(PROMPT)
    assert one.calibrator_for(CONFIG) is known
    assert generation.calibrated
    assert generation.out_of_domain
    assert generation.answer_risk == known.answer_risk(generation)
    assert generation.calibrated_on == known.answer.data
    assert scored.calibrated
    assert scored.answer_risk is None
    assert scored.spans[0].token_source_attention
    with pytest.warns(UserWarning, match="out_of_domain"):
        one.with_calibrator(known).generate(PROMPT)


def test_parts_of_answers_have_no_risk_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    one, known = default(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        of_spans = one.without_answer_risk().generate(PROMPT)
        assert one.with_calibrator(known).without_answer_risk().score(PROMPT, "abcd").answer_risk is None
    assert of_spans.calibrated
    assert of_spans.answer_risk is None
    assert one.calibrator is known
    assert one.without_calibrator().without_answer_risk().calibrator is None


def test_where_the_attention_cannot_be_seen_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's attention is code of its own."""
    _, known = default(monkeypatch)
    one = CocoaEngine(tiny_model("falcon"), tiny_tokenizer(), model_name="tiny", config=CONFIG)
    plain = one.without_calibrator().generate(PROMPT)
    assert one.calibrator_for(CONFIG) is None
    generation = one.generate(PROMPT)
    assert generation.spans == plain.spans
    assert generation.risk_source == "token_probability"
    assert one.score(PROMPT, "abcd").risk_source == "token_probability"
    with pytest.raises(CalibrationError, match="cannot be seen"):
        one.with_calibrator(known).generate(PROMPT)


def test_where_the_model_has_no_such_heads_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one, known = default(monkeypatch, heads=((99, 0),))
    assert one.calibrator is None
    assert not one.generate(PROMPT).calibrated
    with pytest.raises(CalibrationError, match="cannot be used with this model"):
        one.with_calibrator(known)


def test_other_settings_or_heads_are_measured_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, _ = default(monkeypatch)
    model = one.model.config
    others = heads_file(tmp_path, model.num_hidden_layers, model.num_attention_heads, [(0, 1)])
    assert not one.generate(PROMPT, decore_heads=others).calibrated
    other = one.generate(PROMPT, gamma=0.2)
    assert not other.calibrated
    assert other == one.without_calibrator().generate(PROMPT, gamma=0.2)
    assert other.source_heads == "spread"  # the heads of the calibrator are not needed
    assert one.generate(PROMPT).source_heads is None


# --- the calibrator that comes with the package


def test_it_is_for_the_embedded_model_with_default_settings(engine: CocoaEngine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        judged = CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator="embedded")
        generation = judged.generate(chat("Who wrote Dune?"), max_new_tokens=16)
    assert generation.calibrated
    assert all(0 <= risk <= 1 for risk in (generation.answer_risk, *(span.risk for span in generation.spans)))
    assert judged.calibrator == RiskCalibrator.load("embedded")
    with pytest.warns(CalibrationWarning, match="the model is"):
        CocoaEngine(engine.model, engine.tokenizer, model_name="another", calibrator="embedded")


def test_a_copied_answer_is_less_risky_than_an_invented_one(engine: CocoaEngine) -> None:
    prompt = "Article: The ferry Maria sank off Crete on Monday; all 40 aboard were saved.\n\nSummary in one sentence:"
    copied, invented = engine.score(prompt, [" The ferry Maria sank off Crete.", " A Delta plane crashed near Oslo."])
    assert copied.max_risk < invented.max_risk


@pytest.mark.parametrize("level", ["span", "answer", "closed_book"])
def test_the_pages_have_its_figures(level: str) -> None:
    of_level = getattr(RiskCalibrator.load("embedded"), level)
    found, auroc, rivals = of_level.validation, of_level.validation.auroc, of_level.validation.rivals
    assert found.folds == 5
    assert "MIT" in of_level.data or level == "closed_book"  # closed_book: fitted on questions of this project
    assert of_level.threshold.rule == "specificity"
    assert "-source attention" in rivals
    assert of_level.domain is not None
    assert all(rival.difference.estimate > 0 for rival in rivals.values())  # it ranks above what needs no fit
    assert f"{auroc.estimate:.3f} for" in " ".join(README.read_text(encoding="utf-8").split())
    page = CALIBRATE.read_text(encoding="utf-8")
    for figure in (
        f"{auroc.estimate:.3f} ({auroc.low:.3f} – {auroc.high:.3f})",
        f"{max(rival.auroc.estimate for rival in rivals.values()):.3f}, ",
        f"{found.brier:.3f} ({found.brier_of_base_rate:.3f})",
        f"{found.ece:.3f}",
        f"{of_level.threshold.value:.3f}",
        f"{found.items:,}",
    ):
        assert figure in page


# --- prompts that are too short for a passage have a risk of answers of their own

BY_LENGTH = {"short": [5] * CLOSED_BOOK_TOKENS, "long": [5] * (CLOSED_BOOK_TOKENS + 1)}


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
            answer = engine.generate(BY_LENGTH[name])
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
    for messages in ([PASSAGE, HISTORY[1], QUESTION], [system, *HISTORY, QUESTION], [*HISTORY, PASSAGE]):
        assert not engine.chat(messages, max_new_tokens=4).closed_book


@pytest.mark.slow
def test_it_is_stored_and_left_out_with_the_risk_of_answers(calibrator: RiskCalibrator) -> None:
    assert RiskCalibrator.model_validate_json(calibrator.model_dump_json()) == calibrator
    spans = calibrator.spans_only()
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
