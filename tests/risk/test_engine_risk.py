"""Calibrated risk in the engine and in every adapter, on the real model."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path

import pytest

from cocoa_engine import CalibrationError, CalibrationWarning, CocoaConfig, CocoaEngine, ConfigError, RiskCalibrator
from cocoa_engine.lab.data import LabelledSpan, LabelledText
from cocoa_engine.lab.forced import TeacherForced
from cocoa_engine.lab.measured import labelled_features
from cocoa_engine.results import Generation
from cocoa_engine.risk.features import ANSWER_FEATURES, SPAN_FEATURES, answer_features, span_features
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.spans import Span
from tests.helpers.alike import near
from tests.helpers.inside import backend_inside
from tests.helpers.made_up_risk import SETTINGS, fitted
from tests.helpers.prompts import chat

PROMPT = chat("What is the capital of Australia?")
HESITANT = chat("Tell me about an island.")
SHORT = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def calibrator(engine: CocoaEngine) -> RiskCalibrator:
    return fitted(model_name=engine.model_name, levels=("span", "answer"))


@pytest.fixture
def calibrated(engine: CocoaEngine, calibrator: RiskCalibrator) -> CocoaEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator=calibrator)


def measured(item: Span | Generation, names: list[str]) -> list[float]:
    """The features of these names."""
    if isinstance(item, Span):
        values = dict(zip(SPAN_FEATURES, span_features(item), strict=True))
    else:
        values = dict(zip(ANSWER_FEATURES, answer_features(item), strict=True))
    return [values[name] for name in names]


def test_every_way_carries_it(engine: CocoaEngine, calibrated: CocoaEngine, calibrator: RiskCalibrator) -> None:
    plain = engine.without_calibrator().generate(PROMPT, risk="f_mlds", **SHORT)
    generated = calibrated.generate(PROMPT, **SHORT)
    assert (generated.calibrated, plain.calibrated, plain.answer_risk) == (True, False, None)
    for before, span in zip(plain.spans, generated.spans, strict=True):
        assert span.calibrated
        assert 0 <= span.risk <= 1
        assert span.risk == calibrator.risk(span) == calibrator.span(measured(before, calibrator.span.features))
        assert before.risk == before.f_mlds
        assert span.model_copy(update={"risk": before.risk, "risk_source": "f_mlds", "flagged": False}) == before
    assert generated.answer_risk == calibrator.answer_risk(plain)
    assert generated.answer_risk == calibrator.answer(measured(plain, calibrator.answer.features))
    assert 0 <= generated.answer_risk <= 1
    with calibrated.stream(PROMPT, **SHORT) as stream:
        assert [span.risk for span in stream] == near([span.risk for span in generated.spans])
    (batched,) = calibrated.generate_batch([PROMPT], **SHORT)
    assert batched.calibrated
    assert [stream.generation.answer_risk, batched.answer_risk] == near([generated.answer_risk] * 2)
    (scored,) = calibrated.score(PROMPT, ["Canberra."])
    assert scored.calibrated
    assert scored.max_risk == calibrator.risk(scored.spans[0])
    assert scored.answer_risk == calibrator.answer_risk(scored)
    assert Generation.model_validate_json(scored.model_dump_json()) == scored
    alone = calibrated.score(PROMPT, "Canberra.")
    assert [alone.answer_risk, calibrator.answer_risk(engine.score(PROMPT, "Canberra."))] == near(
        [scored.answer_risk] * 2
    )
    assert alone.usage.forward_passes == 1  # no candidates are grown for the risk of the answer
    plain_again = calibrated.without_calibrator()
    assert plain_again.calibrator is None
    assert backend_inside(plain_again) is backend_inside(calibrated)
    assert plain_again.without_calibrator() is plain_again
    assert calibrated.calibrator is calibrator


@pytest.mark.parametrize("level", ["span", "answer"])
def test_a_calibrator_of_one_level_leaves_the_other_as_it_is(engine: CocoaEngine, level: str) -> None:
    calibrator = fitted(model_name=engine.model_name, levels=(level,))
    judged = CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator=calibrator)
    scored = judged.score(PROMPT, "Canberra.")
    assert scored.calibrated == (level == "span")
    assert (scored.answer_risk is None) == (level == "span")
    if level == "answer":
        assert scored.risk_source == "token_probability"
    missing, item = (calibrator.answer_risk, scored) if level == "span" else (calibrator.risk, scored.spans[0])
    with pytest.raises(CalibrationError, match="no risk of an answer" if level == "span" else "no risk of a span"):
        missing(item)


def test_features_of_spans_and_answers(engine: CocoaEngine) -> None:
    generation = engine.generate(PROMPT, max_new_tokens=48)
    branched = next(span for span in generation.spans if span.candidates)
    values = dict(zip(SPAN_FEATURES, span_features(branched), strict=True))
    first = [candidate.token_log_probs[0] for candidate in branched.candidates]
    assert values["candidates"] == len(first)
    assert values["candidate_spread"] == first[0] - first[-1] > 0
    assert values["source_attention"] == branched.source_attention
    assert values["entropy"] == branched.token_entropies[0]
    assert values["margin"] == near(first[0] - first[1])
    assert values["min_log_prob"] == min(branched.token_log_probs)
    greedy = next(span for span in generation.spans if not span.candidates)
    assert measured(greedy, ["candidates", "candidate_spread"]) == [1, 0]
    values = dict(zip(ANSWER_FEATURES, answer_features(generation), strict=True))
    contested = [margin <= -math.log(0.3) for span in generation.spans for margin in span.token_margins]
    assert 0 < sum(contested) < len(contested)
    assert values["contested"] == sum(contested) / len(contested)
    assert values["log_contested"] == math.log1p(sum(contested))
    assert values["log_prompt_tokens"] == math.log1p(len(engine.encode(PROMPT)))
    attention = sorted(value for span in generation.spans for value in span.token_source_attention)
    lowest = attention[: math.ceil(len(attention) / 5)]
    assert values["source_attention"] == pytest.approx(sum(attention) / len(attention))
    assert values["lowest_source_attention"] == pytest.approx(sum(lowest) / len(lowest))


def test_a_given_text_has_the_features_of_the_same_decoded_one(engine: CocoaEngine) -> None:
    """Where spans end at their own next risk point, a text is cut as it was decoded."""
    config = CocoaConfig(span_boundary="own", max_new_tokens=40, max_span_tokens=8)
    generation = engine.generate(HESITANT, config=config)
    prompt, text = engine.encode(HESITANT), generation.token_ids
    (profile,) = Profiler(engine.session, config)(prompt, [text])
    parts = (LabelledSpan(0, 5),)
    forced = TeacherForced(LabelledText("1", "1", generation.text, "?", None, parts, PROMPT), profile, profile.ends)
    found = labelled_features([forced], config, engine.num_layers)["span"]
    made = [span for span in generation.spans if span.text.strip()]
    assert len(found.features) == len(made)
    free = [span.preceding.tokens + 8 <= len(text) for span in made]  # no branch was cut short by the answer's end
    assert sum(free) > 5
    for row, span, compared in zip(found.features.tolist(), made, free, strict=True):
        if compared:
            assert row == pytest.approx(measured(span, list(found.names)), abs=2e-3)


def test_what_is_copied_and_what_stands_before(engine: CocoaEngine) -> None:
    prompt = chat("Say this again: The grey heron is a long-legged wading bird.")
    ids = engine.encode(prompt)
    generation = engine.generate(prompt, max_new_tokens=32)
    copied = [run for span in generation.spans for run in span.token_copied]
    for at, (token_id, run) in enumerate(zip(generation.token_ids, copied, strict=True)):
        assert (run > 0) == (token_id in ids)
        held = [ids[start : start + run] for start in range(len(ids))]
        assert generation.token_ids[at + 1 - run : at + 1] in held or not run
        longer = generation.token_ids[at - run : at + 1]
        assert run in (3, at + 1) or longer not in [ids[start : start + run + 1] for start in range(len(ids))]
    assert max(copied) == 3
    first, *others = generation.spans
    assert first.preceding.tokens == 0
    log_probs = list(first.token_log_probs)
    for span in others:
        assert span.preceding.tokens == len(log_probs)
        assert span.preceding.log_prob == pytest.approx(sum(log_probs[-4:]) / len(log_probs[-4:]))
        near = copied[max(0, len(log_probs) - 4) : len(log_probs)]
        assert span.preceding.copied == pytest.approx(sum(run > 0 for run in near) / len(near))
        log_probs += span.token_log_probs
    (scored,) = engine.score(prompt, [generation.text])
    assert scored.spans[0].token_copied == copied[: len(scored.token_ids)]


def test_another_model_or_settings_warn_once(engine: CocoaEngine, calibrated: CocoaEngine, tmp_path: Path) -> None:
    calibrated.calibrator.save(tmp_path / "risk.json")
    with pytest.warns(CalibrationWarning, match=f"the model is another, not {engine.model_name}"):
        other = CocoaEngine(engine.model, engine.tokenizer, model_name="another", calibrator=tmp_path / "risk.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated.score(PROMPT, "Canberra.", alpha=1.0, max_new_tokens=3)  # nothing that it depends on
        assert other.score(PROMPT, "Canberra.").calibrated  # it was said
    with pytest.warns(CalibrationWarning, match="final_layer is pre_norm, not post_norm"):
        calibrated.score(PROMPT, "Canberra.", final_layer="pre_norm")
    with pytest.warns(CalibrationWarning, match=r"middle_layers is \(1, 2\), not \(10, 20\); gamma is 0.5"):
        calibrated.generate(PROMPT, middle_layers=(1, 2), gamma=0.5, max_new_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated.generate(PROMPT, middle_layers=(1, 2), max_new_tokens=1)
        calibrated.generate(PROMPT, method="cocoa", metric="con_mlds", max_new_tokens=1)  # which have candidates, too
    with pytest.warns(CalibrationWarning, match="method='greedy' grows no candidates to compare"):
        calibrated.generate(PROMPT, method="greedy", max_new_tokens=1)


def test_settings_are_looked_at_where_they_are_given(engine: CocoaEngine) -> None:
    settings = {"middle_layers": (20, 29), "final_layer": "pre_norm"}
    calibrator = fitted(model_name=engine.model_name, settings=SETTINGS.model_copy(update=settings))
    given = {"model_name": engine.model_name, "calibrator": calibrator}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        own = CocoaEngine(engine.model, engine.tokenizer, **given)  # its calls may have the calibrator's settings
        assert own.score(PROMPT, "Canberra.", **settings).calibrated
    with pytest.warns(CalibrationWarning, match="final_layer is post_norm, not pre_norm"):
        own.score(PROMPT, "Canberra.")
    with pytest.warns(CalibrationWarning, match="final_layer is post_norm, not pre_norm"):
        CocoaEngine(engine.model, engine.tokenizer, **given, config=CocoaConfig())


def test_what_is_no_calibrator(engine: CocoaEngine, tmp_path: Path) -> None:
    for make in (partial(CocoaEngine, engine.model, engine.tokenizer), CocoaEngine.from_pretrained):
        with pytest.raises(CalibrationError, match="cannot be read"):
            make(calibrator=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="RiskCalibrator or its file, not dict"):
        CocoaEngine(engine.model, engine.tokenizer, calibrator={})  # type: ignore[arg-type]


def test_thresholds_flag_spans(calibrated: CocoaEngine, calibrator: RiskCalibrator) -> None:
    generation = calibrated.score(PROMPT, "Canberra.")
    (span,) = generation.spans
    with pytest.raises(CalibrationError, match="no threshold"):
        calibrator.flags(span)
    with_one = fitted(threshold=("recall", 0.5), levels=("span", "answer"))
    assert with_one.flags(span) == (with_one.risk(span) >= with_one.span.threshold.value)
    assert with_one.flags_answer(generation) == (generation.answer_risk >= with_one.answer.threshold.value)
