"""The sentences about the risk of an answer: in words of everyday life, whatever the risk is."""

from __future__ import annotations

import re
from itertools import accumulate
from math import log
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import Generation, RiskSource, Span
from cocoa_engine.rendering import wording
from cocoa_engine.rendering.highlights import Answer, RiskScale
from cocoa_engine.rendering.wording import NOT_CALIBRATED, SOURCES, statistics, verdict
from cocoa_engine.risk import LOWEST_SHADE
from cocoa_engine.safe_text import safe
from tests.helpers.made_up_answers import generation

TERMS = re.compile(r"MLDS|\b(p|log|tokens?|rank\w*|quantiles?|logits?)\b", re.IGNORECASE)
"""Terms of the field, which belong into documentation and JSON."""


def sentences(answer: Answer) -> list[str]:
    """What a person is told about the risk of an answer."""
    other = generation(("all", 0.1), risk_source="calibrator" if answer.risk_source != "calibrator" else "f_mlds")
    return [
        verdict(answer),
        wording.describe_scale([answer], RiskScale.of(answer.spans)),
        wording.describe_different_kinds([answer, other]) or "",
        wording.summary(answer).partition("; ")[2],
        statistics(answer.spans[0])[0][2],
    ]


def test_every_figure_of_a_span_is_listed_with_its_meaning() -> None:
    span = generation(("It", 0.5)).spans[0].model_copy(update={"probe": 0.1, "token_source_attention": [0.2]})
    figures = {name for name in (*Span.model_fields, *Span.model_computed_fields) if type(getattr(span, name)) is float}
    rows = [row for row in statistics(span) if row[0] not in ("tokens", "entropy")]
    assert len(rows) == len(figures - {"self_information"}) >= 8  # which is -log p
    assert all(meaning for _, _, meaning in rows)


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
        ("token_probability", 0.3, 'The model was a little unsure about "1847".'),
        ("source_attention", 0.93, 'The model looked little at the source for "1847".'),
        ("source_attention", 0.3, 'The model looked a little less at the source for "1847".'),
        ("token_probability", 0.2, "The model was fairly sure of every word."),
        ("source_attention", 0.2, "The model looked at the source for every part of this answer."),
    ],
)
def test_the_verdict_names_the_riskiest_claim(source: RiskSource, risk: float, words: str) -> None:
    answer = generation(("It was built in", 0.05), (" 1847", risk), risk_source=source)
    assert verdict(answer) == f"{words} {NOT_CALIBRATED}"


def test_a_risk_outside_all_claims_and_one_of_spans_alone_are_said() -> None:
    answer = generation(("It was built", 0.05), (" by", 0.9), risk_source="source_attention")
    assert verdict(answer).startswith("The model looked little at the source for a part of this answer.")
    answer = generation(("It was built", 0.05), risk_source="calibrator")
    assert verdict(answer).startswith("The risk of the answer as a whole was not measured.")


@given(
    st.lists(st.tuples(st.sampled_from(["Rome", "the", "1847", ".", ""]), st.floats(0.01, 1)), min_size=1, max_size=6),
    st.booleans(),
)
def test_the_model_is_unsure_about_a_listed_claim_or_the_word_of_its_least_probable_token(
    tokens: list[tuple[str, float]], known: bool
) -> None:
    texts = [f" {text}" if text.isalnum() else text for text, _ in tokens]
    probabilities = [probability for _, probability in tokens]
    ends = list(accumulate(map(len, texts)))
    risk = 1 - min(probabilities)
    (span,) = generation(("".join(texts), risk)).spans
    measured = {"token_ids": [7] * len(tokens), "token_log_probs": [log(one) for one in probabilities]}
    span = span.model_copy(update={**measured, "token_ends": ends if known else []})
    answer = generation(("".join(texts), risk)).model_copy(update={"spans": [span]})
    words = [text.strip() for text in texts if text.strip(" .")]
    word = texts[probabilities.index(min(probabilities))].strip(" .") if known else words[0] if len(words) == 1 else ""
    listed = [" ".join(one.text.split()) for one in answer.check_these()]
    if listed:  # the sentence and the list agree
        word = next((one for one in listed if word and word in one.split()), listed[0])
    named = f'"{word}"' if word else "a part of this answer"
    said = verdict(answer).removesuffix(f" {NOT_CALIBRATED}")
    unsure = {f"The model was unsure about {named}.", f"The model was a little unsure about {named}."}
    assert said in (unsure if risk >= LOWEST_SHADE else {"The model was fairly sure of every word."})


@given(
    st.lists(st.tuples(st.sampled_from([" Rome", " the", " 1847", "."]), st.floats(0, 1), st.booleans()), min_size=1),
    st.sampled_from(["token_probability", "source_attention"]),
)
def test_the_verdict_names_a_part_wherever_anything_is_shaded_or_listed(
    parts: list[tuple[str, float, bool]], source: RiskSource
) -> None:
    answer = generation(*((text, risk) for text, risk, _ in parts), risk_source=source)
    flagged = [span.model_copy(update={"flagged": part[2]}) for span, part in zip(answer.spans, parts, strict=True)]
    answer = answer.model_copy(update={"spans": flagged})
    shown = answer.check_these() or any(RiskScale().level(span.risk) for span in answer.spans)
    assert ("every" in verdict(answer)) == (not shown)


@given(st.lists(st.tuples(st.text(max_size=60), st.sampled_from([0.1, 0.9, float("nan")])), min_size=1, max_size=4))
def test_the_verdict_is_one_short_line_whatever_the_model_wrote(parts: list[tuple[str, float]]) -> None:
    answer: Generation = generation(*parts)
    said = verdict(answer)
    assert len(said) < 450  # a character that is shown by its name has eight
    assert said.splitlines() == [said]
    assert safe(said) == said
