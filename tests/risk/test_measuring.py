"""The risk of words, claims and sentences, and the list of claims to check."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from math import log
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import Candidate, Generation, RiskSource, Span
from cocoa_engine.rendering.highlights import RiskScale
from cocoa_engine.risk import MeasuredText
from tests.helpers.made_up_answers import figures, generation


def answer(*parts: tuple[str, float], **given: Sequence[Any]) -> Generation:
    """An answer of one-token spans; ``given`` has a value for each of them, by the name of the field."""
    bare = generation(*parts)
    spans = []
    for number, span in enumerate(bare.spans):
        own = {name: [values[number]] for name, values in given.items()}
        spans.append(span.model_copy(update={"token_ends": [span.end], **own}))
    usage = bare.usage.model_copy(update={"prompt_tokens": 100})  # which may hold a passage
    return bare.model_copy(update={"spans": spans, "usage": usage})


def rival(text: str) -> Candidate:
    return Candidate(**figures(text), is_greedy=False)


def competed(whole: Generation, number: int, *texts: str) -> Generation:
    """The answer, with candidates of one span: its own text, then others."""
    spans = list(whole.spans)
    candidates = [rival(text) for text in (spans[number].text, *texts)]
    spans[number] = spans[number].model_copy(update={"candidates": candidates, "chosen": 0})
    return whole.model_copy(update={"spans": spans})


def test_a_claim_has_the_highest_risk_of_its_spans_and_a_sentence_the_mean_of_three_claims() -> None:
    parts = (("The Se", 0.1), ("ine", 0.7), (" is long", 0.2), (" brown", 0.4), (" water.", 0.3), (" Was it", 0.8))
    whole = answer(*parts)
    claims = [("Seine", 0.7, [0, 1]), ("long", 0.2, [2]), ("brown", 0.4, [3]), ("water", 0.3, [4])]
    assert [(one.text, one.risk, one.spans) for one in whole.claims] == claims
    first, second = whole.sentences
    assert first.risk == pytest.approx((0.7 + 0.4 + 0.3) / 3)
    assert second.risk == 0.8  # without a claim: the highest of its spans
    assert (second.text, second.start, second.end, second.kind, second.spans) == ("Was it", 31, 37, "sentence", [5])
    assert [one.text for one in whole.words] == ["The", "Seine", "is", "long", "brown", "water", "Was", "it"]


def test_a_risk_that_is_no_number_is_the_highest() -> None:
    whole = answer(("Ri", 0.9), ("sk", math.nan), ("y", 0.95), (" words", 0.1))
    assert math.isnan(whole.claims[0].risk or 0)
    assert math.isnan(whole.sentences[0].risk or 0)
    assert [one.text for one in whole.check_these()] == ["Risky"]


def test_fewer_claims_than_asked_where_nothing_differs() -> None:
    full_stop = answer(("The", 0.95), (" Seine", 0.6), (" is", 0.9), (" long", 0.1), (".", 0.99))
    assert [(one.text, one.risk) for one in full_stop.check_these()] == [("Seine", 0.6)]
    assert answer(("The Seine", 0.6), (" is long", 0.6), (".", 0.9)).check_these() == []
    sure = answer(("Paris", 0.6), (".", 0.9), token_log_probs=[-0.1, -3.0])
    assert sure.check_these() == []
    unsure = answer(("Paris", 0.6), (".", 0.9), token_log_probs=[-1.0, -3.0])
    assert [one.text for one in unsure.check_these()] == ["Paris"]  # the only one, but for a reason
    assert answer((" ...", 0.6)).check_these() == []
    many = answer(*((f" word{number}", number / 10) for number in range(8)))
    assert [one.text for one in many.check_these()] == ["word7", "word6", "word5"]
    assert len(many.check_these(5)) == 5
    assert many.check_these(0) == []
    with pytest.raises(ValueError, match="-1"):
        many.check_these(-1)


@pytest.mark.parametrize("source", get_args(RiskSource))
@pytest.mark.parametrize("flagged", [False, True])
def test_only_claims_that_are_shaded_or_flagged_are_listed(source: RiskSource, flagged: bool) -> None:
    whole = answer(("Canberra", 0.01), (" lies in", 0.24), (" Australia", 0.04), (" today", 0.25), (".", 0.9))
    spans = [span.model_copy(update={"risk_source": source}) for span in whole.spans]
    spans[2] = spans[2].model_copy(update={"flagged": flagged})
    listed = [one.text for one in whole.model_copy(update={"spans": spans}).check_these()]
    shaded = [] if source in ("f_mlds", "con_mlds") else ["today"]
    assert listed == shaded + ["Australia"] * flagged


@given(
    st.sampled_from(get_args(RiskSource)),
    st.lists(st.tuples(st.sampled_from(["Rome", " old", " is", ".", "\n"]), st.floats(0, 2), st.booleans())),
)
def test_every_listed_claim_is_shaded_or_flagged(source: RiskSource, parts: list[tuple[str, float, bool]]) -> None:
    whole = generation(*((text, risk) for text, risk, _ in parts), risk_source=source)
    spans = [span.model_copy(update={"flagged": part[2]}) for span, part in zip(whole.spans, parts, strict=True)]
    whole = whole.model_copy(update={"spans": spans})
    scale = RiskScale.of(spans)
    for check in whole.check_these(9):
        assert scale.level(check.risk) or any(spans[number].flagged for number in check.spans)


def test_claims_of_one_span_are_told_apart_by_their_tokens() -> None:
    values = {**figures("rhine seine", 0.5), "token_ids": [1, 2], "token_log_probs": [-0.1, -2.0]}
    span = Span(**values, start=0, end=11, kind="given", risk=0.5, token_ends=[5, 11])
    whole = generation(("rhine seine", 0.5)).model_copy(update={"spans": [span]})
    assert [one.text for one in whole.check_these(1)] == ["seine"]
    attending = span.model_copy(update={"token_source_attention": [0.1, 0.6]})
    assert [one.text for one in whole.model_copy(update={"spans": [attending]}).check_these(1)] == ["rhine"]


def test_reasons() -> None:
    whole = answer(
        *(("Anna", 0.1), (" met", 0.2), (" Boris", 0.9), (" in", 0.1), (" Rome", 0.8), (" today", 0.3)),
        token_source_attention=[0.5, 0.5, 0.1, 0.5, 0.2, 0.5],
        token_log_probs=[log(0.9), log(0.9), log(0.9), -9.0, log(0.4), log(0.9)],
        token_copied=[1, 1, 0, 1, 1, 1],
    )
    reasons = {one.text: one.reasons for one in whole.claims}
    assert reasons == {
        "Anna": [],
        "met": [],
        "Boris": ["not in the source"],
        "Rome": ["little attention to the source", "the model was unsure"],
        "today": [],
    }
    (first, second) = whole.check_these(2)
    assert first.text == "Boris"
    assert second.reasons == reasons["Rome"]
    alone = whole.model_copy(update={"usage": whole.usage.model_copy(update={"prompt_tokens": 64})})
    assert {one.text: one.reasons for one in alone.claims if one.reasons} == {"Rome": ["the model was unsure"]}


@pytest.mark.parametrize(
    ("before", "own", "rivals", "claim", "others"),
    [
        ("The capital is", " Paris", (" Lyon", " Paris", " Paris,"), "Paris", ["Lyon…"]),
        ("The capital is", " Paris today", (" Lyon today.", " Paris now."), "Paris", ["Lyon"]),
        ("The capital is", " Paris today", (" Lyon today.", " Paris now."), "today", ["now"]),
        ("The Mar", "seille port", ("tinique port", "seille port"), "Marseille", ["Martinique"]),
        ("It has", " 20 million", (" 30 million people", " many"), "20 million", ["30 million", "many…"]),
        ("He", ".", (" left.",), "", []),
    ],
)
def test_what_competed_is_what_differs_inside_the_claim(
    before: str, own: str, rivals: tuple[str, ...], claim: str, others: list[str]
) -> None:
    whole = competed(answer((before, 0.1), (own, 0.8), (" and others left", 0.2)), 1, *rivals)
    listed = {one.text: one for one in whole.check_these(5)}
    if not claim:
        assert all(not one.competing for one in listed.values())
        return
    assert listed[claim].competing == others
    assert listed[claim].reasons[-1:] == [f"competing: {', '.join(others)}"]


def test_units_are_neither_serialised_nor_copied() -> None:
    whole = answer(("The Seine", 0.1), (" is long", 0.7))
    before = whole.model_dump_json()
    assert whole.claims is whole.claims  # computed once
    assert whole.model_dump_json() == before
    changed = whole.model_copy(update={"text": "The Loire is long"})
    assert [one.text for one in changed.claims] == ["Loire", "long"]
    restored = pickle.loads(pickle.dumps(whole))
    assert restored == whole
    assert "_measured" not in restored.__dict__
    assert [one.text for one in restored.claims] == ["Seine", "long"]
    assert Generation.model_validate_json(before) == whole


def test_units_of_the_answer_leave_the_reasoning_out() -> None:
    whole = answer(("Hm, Rome?</think>", 0.9), (" Paris", 0.4), (" shines.", 0.2))
    units = MeasuredText("</think> Paris shines.", whole.spans[0:], begin=17, offset=9)
    assert [(one.text, one.start, whole.text[one.start : one.end]) for one in units.claims] == [
        ("Paris", 18, "Paris"),
        ("shines", 24, "shines"),
    ]
    assert [one.text for one in units.sentences] == ["Paris shines."]


def test_spans_without_tokens_and_without_risk() -> None:
    """Reports of an earlier version have no ends of tokens; a span may have no risk."""
    whole = generation(("東京は", 0.2), ("首都です", 0.8))
    assert [(one.text, one.risk) for one in whole.words] == [("東京は", 0.2), ("首都です", 0.8)]
    bare = whole.model_copy(update={"spans": [one.model_copy(update={"risk": None}) for one in whole.spans]})
    assert [one.risk for one in bare.claims] == [None, None]
    assert bare.check_these() == []
