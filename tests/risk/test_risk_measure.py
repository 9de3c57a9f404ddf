"""Which value of a span is its risk: ``CocoaConfig.risk``, the default calibrator, and the thresholds."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CocoaConfig, CocoaEngine, ConfigError, Generation
from cocoa_engine.methods.retrieval_heads import heads_of_model
from cocoa_engine.risk import embedded_calibrator
from cocoa_engine.risk.fitted import PROBABILITY_THRESHOLD, threshold_of
from cocoa_engine.risk.policy import RANK_THRESHOLD, TOKEN_THRESHOLD, reaches, risk_measure, token_risk
from tests.helpers.made_up_risk import fitted
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

SHORT: dict[str, Any] = {"max_new_tokens": 12}
PROMPT = "the ring is a thing"


@pytest.fixture(scope="module")
def tiny() -> CocoaEngine:
    return CocoaEngine(tiny_model("llama", seed=6), tiny_tokenizer())


@given(st.lists(st.floats(-1e4, 0.0), min_size=1))
def test_token_risk_is_that_of_the_least_probable_token(log_probs: list[float]) -> None:
    assert 0 <= token_risk(log_probs) <= 1
    assert token_risk(log_probs) == pytest.approx(1 - min(math.exp(one) for one in log_probs))


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1))
def test_what_is_not_a_number_reaches_every_threshold(risk: float, threshold: float) -> None:
    assert reaches(risk, threshold) == (math.isnan(risk) or risk >= threshold)
    assert not reaches(risk, None)
    assert not reaches(None, threshold)


def test_without_a_calibrator_it_is_the_least_probable_token(tiny: CocoaEngine) -> None:
    answers = [tiny.generate(PROMPT, **SHORT), tiny.score(PROMPT, "a thing is")]
    with tiny.stream(PROMPT, **SHORT) as stream:
        streamed = list(stream)
    assert stream.generation == answers[0]
    assert streamed == answers[0].spans
    for answer in answers:
        assert (answer.risk_source, answer.threshold) == ("token_probability", TOKEN_THRESHOLD)
        assert not answer.calibrated
        for span in answer.spans:
            assert span.risk == pytest.approx(1 - math.exp(min(span.token_log_probs)))
            assert span.flagged == (span.risk >= TOKEN_THRESHOLD)
        assert Generation.model_validate_json(answer.model_dump_json()) == answer


def test_with_a_source_it_is_the_rank_of_the_source_attention(engine: CocoaEngine) -> None:
    plain = engine.without_calibrator()
    heads = heads_of_model(None, engine.session.model)
    assert heads is not None
    prompt = "The lighthouse was built in 1874 by Marta Lindqvist.\nQuestion: Who built it?\nAnswer:"
    source = ["The lighthouse was built in 1874 by Marta Lindqvist."]
    answers = [
        plain.generate(prompt, source=source, **SHORT),
        plain.generate_batch([prompt], source=[source], **SHORT)[0],
        plain.score(prompt, " Marta Lindqvist", source=source),
        plain.generate(prompt, risk="source_attention", **SHORT),
    ]
    for answer in answers:
        assert (answer.risk_source, answer.threshold) == ("source_attention", RANK_THRESHOLD)
        assert [span.risk for span in answer.spans] == [heads.rank(span.source_attention) for span in answer.spans]
    with plain.stream(prompt, source=source, **SHORT) as stream:
        assert {span.risk_source for span in stream} == {"source_attention"}
    assert plain.generate(prompt, **SHORT).risk_source == "token_probability"
    assert engine.generate(prompt, source=source, **SHORT).risk_source == "calibrator"


def test_where_source_attention_is_not_measured(tiny: CocoaEngine, engine: CocoaEngine) -> None:
    with pytest.raises(ConfigError, match="cocoa heads"):
        tiny.generate(PROMPT, risk="source_attention")
    assert tiny.generate(PROMPT, source=["ring"], **SHORT).risk_source == "token_probability"
    heads = heads_of_model(None, engine.session.model)
    unmeasured = tiny.score(PROMPT, "a thing").spans[0].model_copy(update={"token_source_attention": []})
    auto = risk_measure(CocoaConfig(), heads=heads, has_source=True)
    assert auto(unmeasured).source == "token_probability"
    assert risk_measure(CocoaConfig(risk="source_attention"), heads=heads)(unmeasured).value is None


@pytest.mark.parametrize("name", ["f_mlds", "con_mlds"])
def test_a_raw_mlds_is_the_risk_only_if_it_is_asked_for(tiny: CocoaEngine, name: Any) -> None:
    answer = tiny.generate(PROMPT, risk=name, **SHORT)
    assert (answer.risk_source, answer.threshold) == (name, None)
    assert [span.risk for span in answer.spans] == [getattr(span, name) for span in answer.spans]
    assert not any(span.flagged for span in answer.spans)
    assert tiny.generate(PROMPT, risk=name, max_risk=1.99, **SHORT).finish_reason != "risk"


def test_a_limit_outside_the_scale_is_refused_with_the_way_that_works() -> None:
    with pytest.raises(ConfigError, match="risk='f_mlds'"):
        CocoaConfig(max_risk=1.2)
    assert CocoaConfig(max_risk=1.2, risk="f_mlds").max_risk == 1.2


def test_a_calibrated_risk_needs_a_calibrator(tiny: CocoaEngine) -> None:
    for call in (tiny.generate, tiny.stream, partial(tiny.score, text="a thing")):
        with pytest.raises(ConfigError, match="cocoa calibrate"):
            call(PROMPT, risk="calibrator")
    answers_only = fitted(levels=("answer",))
    assert risk_measure(CocoaConfig(), answers_only).source == "token_probability"
    assert risk_measure(CocoaConfig(risk="f_mlds"), fitted()).source == "f_mlds"
    assert risk_measure(CocoaConfig(), fitted()).source == "calibrator"


def test_the_default_calibrator_is_that_of_the_embedded_model_and_its_settings(engine: CocoaEngine) -> None:
    """It is used without a warning where it fits, and left out without one where it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitting = engine.generate(PROMPT, **SHORT)
        other = [engine.generate(PROMPT, method="greedy", **SHORT), engine.generate(PROMPT, gamma=0.2, **SHORT)]
    assert (fitting.risk_source, fitting.threshold) == ("calibrator", threshold_of(embedded_calibrator().span))
    assert fitting.answer_risk is not None
    assert [span.risk for span in fitting.spans] == [embedded_calibrator().risk(span) for span in fitting.spans]
    assert {answer.risk_source for answer in other} == {"token_probability"}
    assert engine.calibrator_for(other[0].config) is None
    assert engine.without_calibrator().generate(PROMPT, **SHORT).risk_source == "token_probability"
    assert engine.score(PROMPT, " a thing").answer_risk is None  # it was fitted on the model's own answers


def test_other_models_have_no_default_calibrator(tiny: CocoaEngine) -> None:
    assert tiny.calibrator is None
    named = CocoaEngine(tiny.model, tiny.tokenizer, model_name=embedded_calibrator().model_name)
    assert named.generate(PROMPT, **SHORT).risk_source == "token_probability"  # other layers


@pytest.mark.slow
def test_a_calibrator_has_the_threshold_that_was_chosen_or_the_middle() -> None:
    chosen = fitted(threshold=("recall", 0.8)).span
    assert threshold_of(chosen) == chosen.threshold.value != PROBABILITY_THRESHOLD
    assert threshold_of(fitted().span) == PROBABILITY_THRESHOLD
