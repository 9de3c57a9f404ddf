"""The default calibrator: where it applies, and what the pages say that the embedded one is worth."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from cocoa_engine import CalibrationError, CalibrationWarning, CocoaConfig, CocoaEngine, RiskCalibrator
from cocoa_engine.risk import policy
from tests.helpers.backends import PROMPTS
from tests.helpers.made_up_risk import fitted
from tests.helpers.paths import README
from tests.helpers.prompts import chat
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

CALIBRATE = README.parent / "docs" / "how-to" / "calibrate.md"
PROMPT = PROMPTS[2]
CONFIG = CocoaConfig(max_new_tokens=8, middle_layers=(0, 1))


def default(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[tuple[int, int], ...] = ((1, 0),)
) -> tuple[CocoaEngine, RiskCalibrator]:
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
    assert all(0 <= span.risk <= 1 for span in generation.spans)
    assert 0 <= generation.answer_risk <= 1
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
    found = of_level.validation
    assert found.folds == 5
    assert "MIT" in of_level.data or level == "closed_book"  # closed_book: fitted on questions of this project
    assert of_level.threshold.rule == "specificity"
    auroc = found.auroc
    assert f"{auroc.estimate:.3f} for" in " ".join(README.read_text(encoding="utf-8").split())
    page = CALIBRATE.read_text(encoding="utf-8")
    assert f"{auroc.estimate:.3f} ({auroc.low:.3f} – {auroc.high:.3f})" in page
    assert f"{max(rival.auroc.estimate for rival in found.rivals.values()):.3f}, " in page
    assert "-source attention" in found.rivals
    assert f"{found.brier:.3f} ({found.brier_of_base_rate:.3f})" in page
    assert f"{found.ece:.3f}" in page
    assert f"{of_level.threshold.value:.3f}" in page
    assert f"{found.items:,}" in page
    assert of_level.domain is not None


def test_it_ranks_above_what_needs_no_fit() -> None:
    """The figures of the file itself, on prompts left out."""
    embedded = RiskCalibrator.load("embedded")
    for of_level in (embedded.span, embedded.answer, embedded.closed_book):
        assert of_level is not None
        assert all(rival.difference.estimate > 0 for rival in of_level.validation.rivals.values())
