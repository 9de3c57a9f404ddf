"""The sentences about the risk of an answer: in words of everyday life, whatever the risk is."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import Generation, RiskSource
from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.rendering.verdict import verdict
from cocoa_engine.rendering.wording import (
    NOT_CALIBRATED,
    SOURCES,
    describe_different_kinds,
    describe_risk,
    describe_scale,
    statistics,
)
from cocoa_engine.safe_text import safe
from tests.helpers.made_up_answers import generation

TERMS = re.compile(r"MLDS|\b(p|log|tokens?|rank\w*|quantiles?|logits?)\b", re.IGNORECASE)
"""Terms of the field, which belong into documentation and JSON."""


def sentences(answer: Answer) -> list[str]:
    """What a person is told about the risk of an answer."""
    other = generation(("all", 0.1), risk_source="calibrator" if answer.risk_source != "calibrator" else "f_mlds")
    return [
        verdict(answer),
        describe_scale([answer], RiskScale.of(answer.spans)),
        describe_different_kinds([answer, other]) or "",
        describe_risk(answer),
        statistics(answer.spans[0], answer.config)[0].meaning,
    ]


@pytest.mark.parametrize("source", get_args(RiskSource))
@pytest.mark.parametrize("risk", [0.1, 0.9])
def test_no_sentence_needs_statistics(source: RiskSource, risk: float) -> None:
    answer = generation(("It was", 0.05), (" built", 0.05), (" in 1847", risk), risk_source=source)
    assert [one for one in sentences(answer) if TERMS.search(one)] == []
    assert verdict(answer).count(NOT_CALIBRATED) == (source != "calibrator")
    assert TERMS.search(SOURCES[source]) is None  # also in the errors and comments of adapters


@pytest.mark.parametrize(
    ("source", "risk", "words"),
    [
        ("token_probability", 0.93, 'The model was unsure about "1847".'),
        ("token_probability", 0.3, "The model was fairly sure of every word."),
        ("source_attention", 0.93, 'The model looked little at the source for "1847".'),
        ("source_attention", 0.3, "The model looked at the source for every part of this answer."),
    ],
)
def test_the_verdict_names_the_riskiest_claim(source: RiskSource, risk: float, words: str) -> None:
    answer = generation(("It was built", 0.05), (" in 1847", risk), risk_source=source)
    assert verdict(answer) == f"{words} {NOT_CALIBRATED}"


def test_a_risk_outside_all_claims_is_not_passed_over() -> None:
    answer = generation(("It was built", 0.05), (" by", 0.9), risk_source="token_probability")
    assert verdict(answer).startswith("The model was unsure about a part of this answer.")


@given(st.lists(st.tuples(st.text(max_size=60), st.sampled_from([0.1, 0.9, float("nan")])), min_size=1, max_size=4))
def test_the_verdict_is_one_short_line_whatever_the_model_wrote(parts: list[tuple[str, float]]) -> None:
    answer: Generation = generation(*parts)
    said = verdict(answer)
    assert len(said) < 450  # a character that is shown by its name has eight
    assert said.splitlines() == [said]
    assert safe(said) == said
