"""The calibrator that comes with the package: it fits the embedded model, and the README says what it is worth."""

from __future__ import annotations

import warnings

import pytest

from cocoa_engine import CalibrationWarning, CocoaEngine, RiskCalibrator
from tests.helpers.paths import README
from tests.helpers.prompts import chat

CALIBRATE = README.parent / "docs" / "how-to" / "calibrate.md"


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
    judged = CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator="embedded")
    prompt = "Article: The ferry Maria sank off Crete on Monday; all 40 aboard were saved.\n\nSummary in one sentence:"
    copied, invented = judged.score(prompt, [" The ferry Maria sank off Crete.", " A Delta plane crashed near Oslo."])
    assert copied.max_risk < invented.max_risk


@pytest.mark.parametrize("level", ["span", "answer", "closed_book"])
def test_the_pages_have_its_figures(level: str) -> None:
    fitted = getattr(RiskCalibrator.load("embedded"), level)
    found = fitted.validation
    assert found.folds == 5
    assert "MIT" in fitted.data or level == "closed_book"  # closed_book: fitted on questions of this project
    assert fitted.threshold.rule == "specificity"
    auroc = found.auroc
    assert f"{auroc.estimate:.3f} for" in " ".join(README.read_text(encoding="utf-8").split())
    page = CALIBRATE.read_text(encoding="utf-8")
    assert f"{auroc.estimate:.3f} ({auroc.low:.3f} – {auroc.high:.3f})" in page
    assert f"{max(rival.auroc.estimate for rival in found.rivals.values()):.3f}, " in page
    assert "-source attention" in found.rivals
    assert f"{found.brier:.3f} ({found.brier_of_base_rate:.3f})" in page
    assert f"{found.ece:.3f}" in page
    assert f"{fitted.threshold.value:.3f}" in page
    assert f"{found.items:,}" in page
    assert fitted.domain is not None


def test_it_ranks_above_what_needs_no_fit() -> None:
    """The figures of the file itself, on prompts left out."""
    embedded = RiskCalibrator.load("embedded")
    for fitted in (embedded.span, embedded.answer, embedded.closed_book):
        assert fitted is not None
        assert all(rival.difference.estimate > 0 for rival in fitted.validation.rivals.values())
