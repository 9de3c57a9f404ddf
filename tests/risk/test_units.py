"""Words, claims and sentences of a text and their risk, the list of claims to check, and where tokens end."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import log
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import Candidate, CocoaEngine, ConfigError, Generation, RiskSource, Span
from cocoa_engine.rendering.highlights import RiskScale
from cocoa_engine.risk import MeasuredText
from cocoa_engine.risk.claims import claim_ranges
from cocoa_engine.risk.sentences import sentence_ranges
from cocoa_engine.risk.words import word_ranges
from tests.helpers.alike import near
from tests.helpers.made_up_answers import figures, generation
from tests.helpers.reference import text_of
from tests.helpers.tiny_models import engine_of, pieces_tokenizer, prompt, tiny_model, tiny_tokenizer


def answer(*parts: tuple[str, float], **given: Sequence[Any]) -> Generation:
    """An answer of one-token spans; ``given`` has a value for each of them, by the name of the field."""
    bare = generation(*parts)
    spans = []
    for number, span in enumerate(bare.spans):
        own = {name: [values[number]] for name, values in given.items()}
        spans.append(span.model_copy(update={"token_ends": [span.end], **own}))
    usage = bare.usage.model_copy(update={"prompt_tokens": 100})  # which may hold a passage
    return bare.model_copy(update={"spans": spans, "usage": usage})


def texts_of(units: Sequence[Any]) -> list[str]:
    return [unit.text for unit in units]


def test_a_claim_has_the_highest_risk_of_its_spans_and_a_sentence_the_mean_of_three_claims() -> None:
    parts = (("The Se", 0.1), ("ine", 0.7), (" is long", 0.2), (" brown", 0.4), (" water.", 0.3), (" Was it", 0.8))
    whole = answer(*parts)
    claims = [("Seine", 0.7, [0, 1]), ("long", 0.2, [2]), ("brown", 0.4, [3]), ("water", 0.3, [4])]
    assert [(one.text, one.risk, one.spans) for one in whole.claims] == claims
    first, second = whole.sentences
    assert first.risk == pytest.approx((0.7 + 0.4 + 0.3) / 3)
    assert second.risk == 0.8  # without a claim: the highest of its spans
    assert (second.text, second.start, second.end, second.kind, second.spans) == ("Was it", 31, 37, "sentence", [5])
    assert texts_of(whole.words) == ["The", "Seine", "is", "long", "brown", "water", "Was", "it"]
    whole = answer(("Ri", 0.9), ("sk", math.nan), ("y", 0.95), (" words", 0.1))
    for unit in (whole.claims[0], whole.sentences[0]):  # what is no number is the highest
        assert math.isnan(unit.risk or 0)
    assert texts_of(whole.check_these()) == ["Risky"]


def test_fewer_claims_than_asked_where_nothing_differs() -> None:
    full_stop = answer(("The", 0.95), (" Seine", 0.6), (" is", 0.9), (" long", 0.1), (".", 0.99))
    assert [(one.text, one.risk) for one in full_stop.check_these()] == [("Seine", 0.6)]
    assert answer(("The Seine", 0.6), (" is long", 0.6), (".", 0.9)).check_these() == []
    for log_prob, listed in ((-0.1, []), (-1.0, ["Paris"])):  # the only one, but for a reason
        only = answer(("Paris", 0.6), (".", 0.9), token_log_probs=[log_prob, -3.0])
        assert texts_of(only.check_these()) == listed
    assert answer((" ...", 0.6)).check_these() == []
    many = answer(*((f" word{number}", number / 10) for number in range(8)))
    assert texts_of(many.check_these()) == ["word7", "word6", "word5"]
    assert [len(many.check_these(count)) for count in (5, 0)] == [5, 0]
    with pytest.raises(ValueError, match="-1"):
        many.check_these(-1)


@pytest.mark.parametrize("source", get_args(RiskSource))
@pytest.mark.parametrize("flagged", [False, True])
def test_only_claims_that_are_shaded_or_flagged_are_listed(source: RiskSource, flagged: bool) -> None:
    whole = answer(("Canberra", 0.01), (" lies in", 0.24), (" Australia", 0.04), (" today", 0.25), (".", 0.9))
    spans = [span.model_copy(update={"risk_source": source}) for span in whole.spans]
    spans[2] = spans[2].model_copy(update={"flagged": flagged})
    listed = texts_of(whole.model_copy(update={"spans": spans}).check_these())
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
    assert texts_of(whole.check_these(1)) == ["seine"]
    attending = span.model_copy(update={"token_source_attention": [0.1, 0.6]})
    assert texts_of(whole.model_copy(update={"spans": [attending]}).check_these(1)) == ["rhine"]


def test_reasons() -> None:
    whole = answer(
        *(("Anna", 0.1), (" met", 0.2), (" Boris", 0.9), (" in", 0.1), (" Rome", 0.8), (" today", 0.3)),
        token_source_attention=[0.5, 0.5, 0.1, 0.5, 0.2, 0.5],
        token_log_probs=[log(0.9), log(0.9), log(0.9), -9.0, log(0.4), log(0.9)],
        token_copied=[1, 1, 0, 1, 1, 1],
    )
    assert texts_of(whole.claims) == ["Anna", "met", "Boris", "Rome", "today"]
    reasons = {"Boris": ["not in the source"], "Rome": ["little attention to the source", "the model was unsure"]}
    assert {one.text: one.reasons for one in whole.claims if one.reasons} == reasons
    assert [(one.text, one.reasons) for one in whole.check_these(2)] == list(reasons.items())
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
def test_what_competed_differs_in_the_claim(
    before: str, own: str, rivals: tuple[str, ...], claim: str, others: list[str]
) -> None:
    whole = answer((before, 0.1), (own, 0.8), (" and others left", 0.2))
    candidates = [Candidate(**figures(text), is_greedy=False) for text in (own, *rivals)]
    whole.spans[1] = whole.spans[1].model_copy(update={"candidates": candidates, "chosen": 0})
    listed = {check.text: check for check in whole.check_these(5)}
    if not claim:
        assert all(not check.competing for check in listed.values())
        return
    assert listed[claim].competing == others
    assert listed[claim].reasons[-1:] == [f"competing: {', '.join(others)}"]


def test_units_are_neither_serialised_nor_copied() -> None:
    whole = answer(("The Seine", 0.1), (" is long", 0.7))
    before = whole.model_dump_json()
    assert whole.claims is whole.claims  # computed once
    assert whole.model_dump_json() == before
    changed = whole.model_copy(update={"text": "The Loire is long"})
    assert texts_of(changed.claims) == ["Loire", "long"]
    restored = pickle.loads(pickle.dumps(whole))
    assert restored == whole
    assert "_measured" not in restored.__dict__
    assert texts_of(restored.claims) == ["Seine", "long"]
    assert Generation.model_validate_json(before) == whole


def test_units_without_the_reasoning_the_tokens_and_the_risk() -> None:
    whole = answer(("Hm, Rome?</think>", 0.9), (" Paris", 0.4), (" shines.", 0.2))
    units = MeasuredText("</think> Paris shines.", whole.spans[0:], begin=17, offset=9)
    found = [(one.text, one.start, whole.text[one.start : one.end]) for one in units.claims]
    assert found == [("Paris", 18, "Paris"), ("shines", 24, "shines")]
    assert texts_of(units.sentences) == ["Paris shines."]
    # reports of an earlier version have no ends of tokens; a span may have no risk
    whole = generation(("東京は", 0.2), ("首都です", 0.8))
    assert [(one.text, one.risk) for one in whole.words] == [("東京は", 0.2), ("首都です", 0.8)]
    bare = whole.model_copy(update={"spans": [one.model_copy(update={"risk": None}) for one in whole.spans]})
    assert [one.risk for one in bare.claims] == [None, None]
    assert bare.check_these() == []


TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("abAB zZ09 .,!?\n-*#`\"'“”’()$%/:·。、東京です ก हि é😀\u200d"), st.characters()
    ),
    max_size=60,
)


def words(text: str, cuts: Sequence[int] = ()) -> str:
    return "|".join(text[start:end] for start, end in word_ranges(text, cuts))


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_ranges(text)]


def claims(text: str) -> str:
    return "|".join(
        f"{text[claim.start : claim.end]}: {claim.kind}".removesuffix(": word") for claim in claim_ranges(text)
    )


MARKDOWN = (
    "# Rivers. Of France\nHere they are:\n1. The Seine. It is in Paris.\n2. The Loire\n- **Rhône**: south\n\n"
    "A line that is\nwrapped here. Next.\n```python\nx = 1.\n\ny. Z\n```\n| a | b |\nEnd"
)
OF_MARKDOWN = [
    *("# Rivers.", "Of France", "Here they are:", "1. The Seine.", "It is in Paris.", "2. The Loire"),
    *("- **Rhône**: south", "A line that is\nwrapped here.", "Next.", "```python\nx = 1.\n\ny. Z\n```"),
    *("| a | b |", "End"),
]


@pytest.mark.parametrize(
    ("cut", "text", "pieces"),
    [
        (words, "It cost $3.5 million, or 20%.", "It|cost|$3.5|million|or|20%"),
        (words, "(well-known) “don’t” — yes/no", "well-known|don’t|yes|no"),
        (words, "see www.a.example/b.c?d=1, or a.b@c.example.", "see|www.a.example/b.c?d=1|or|a.b@c.example"),
        (words, "The U.S. used file.py and C++ at -5 °C.", "The|U.S|used|file.py|and|C++|at|-5|C"),
        (words, "end.Next sentence", "end|Next|sentence"),
        (words, "हिन्दी में", "हिन्दी|में"),
        (words, "", ""),
        (words, " ... !? ", ""),
        (words, "東京は日本の首都です。GDP", "東京は日本の首都です|GDP"),
        (partial(words, cuts=(2, 3, 5, 6, 8, 10, 11)), "東京は日本の首都です。GDP", "東京|は|日本|の|首都|です|GDP"),
        (sentences, MARKDOWN, OF_MARKDOWN),
        (claims, "The capital of France is Paris.", "capital|France: name|Paris: name"),
        (claims, "The Bank of England met King Charles III.", "Bank of England: name|met|King Charles III: name"),
        (claims, "It was on 12 March 2014, not on May 3rd.", "12 March 2014: date|May 3rd: date"),
        (claims, "He said “to be or not” and paid 500 million.", "said|to be or not: quote|paid|500 million: number"),
        (claims, "1. First rule\n2. Then two dogs", "First|rule|two: number|dogs"),
        (claims, "He is. They were, and so on!", ""),
        (
            claims,
            "Die Stadt an der Seine, der Marne und an der Oise.",
            "Stadt: name|Seine: name|Marne: name|Oise: name",
        ),
    ],
)
def test_what_is_cut_where(cut: Callable[[str], object], text: str, pieces: object) -> None:
    assert cut(text) == pieces


@pytest.mark.parametrize(
    "parts",
    [
        ["Dr. Smith met J. K. Rowling at 10:30 a.m. on Monday.", "They left."],
        ["He moved to the U.S.", "The U.S. Army paid $3.5 million, e.g. for No. 10 (approx. 2.0.1).", "Why?", "No!"],
        ["Read www.example.com/a.b.", "It is long."],
        ["“Really?” she asked.", "“Yes.”", "Then what?", "maybe so."],
        ["東京は首都です。", "人口は多い！", "はい。"],
        ["यह है।", "वह है।"],
        ["The code `a. B` runs.", "It ends, etc.", "Then more."],
    ],
)
def test_sentences(parts: list[str]) -> None:
    assert sentences(("" if parts[0][0] == "東" else " ").join(parts)) == parts


def test_a_frequent_word_of_another_language_is_no_claim() -> None:
    listed = claims("Talo oli sekä suuri sekä vanha sekä kaunis.").split("|")
    assert "kaunis" in listed
    assert "sekä" not in listed


def test_a_long_word_is_one_word() -> None:
    assert word_ranges("a" * 200_000) == [(0, 200_000)]  # an attempt at an address from each letter would not end


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8))
def test_units_of_any_text_are_exact_and_in_order(text: str, cuts: list[int]) -> None:
    found = (word_ranges(text, cuts), sentence_ranges(text), [(one.start, one.end) for one in claim_ranges(text, cuts)])
    for ranges in found:
        assert all(0 <= start < end <= len(text) for start, end in ranges)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    for start, end in found[0]:
        assert (not text[start:end].isspace() and any(character.isalnum() for character in text[start:end])) or all(
            not character.isascii() for character in text[start:end]
        )
    covered = {at for start, end in found[1] for at in range(start, end)}
    assert all(character.isspace() for at, character in enumerate(text) if at not in covered)
    word_starts, word_ends = {start for start, _ in found[0]}, {end for _, end in found[0]}
    assert all(start in word_starts and end in word_ends for start, end in found[2])


def assert_exact(engine: CocoaEngine, answer: Generation) -> None:
    """Every token's end is that of the text decoded up to it, complete characters only."""
    ids: list[int] = []
    for span in answer.spans:
        assert len(span.token_ends) == len(span.token_ids)
        assert span.token_ends[-1] == span.end
        assert [*span.token_ends] == sorted(span.token_ends)
        assert span.token_ends[0] >= span.start
        for token_id, end in zip(span.token_ids[:-1], span.token_ends[:-1], strict=True):
            ids.append(token_id)
            assert answer.text[:end] == text_of(engine.tokenizer, ids)[: len(answer.text)]
        ids.append(span.token_ids[-1])


def starts_of(answer: Generation) -> list[int]:
    return [0, *accumulate(len(span.token_ids) for span in answer.spans[:-1])]


@pytest.mark.parametrize("method", ["greedy", "cocoa-sig"])
def test_token_ends_of_decoded_answers(method: str) -> None:
    engine = engine_of(tiny_model("llama"))
    given = prompt(3)
    answer = engine.generate(given, method=method, max_new_tokens=24)
    assert len(answer.text) > 5
    assert_exact(engine, answer)
    with engine.stream(given, method=method, max_new_tokens=24) as stream:
        assert list(stream) == answer.spans
    batch = engine.generate_batch([given, prompt(4)], method=method, max_new_tokens=24)
    assert [span.token_ends for span in batch[0].spans] == [span.token_ends for span in answer.spans]
    stopped = engine.generate(given, method=method, max_new_tokens=24, stop=(answer.text[6:9],))
    assert stopped.finish_reason == "stop"
    assert max(end for span in stopped.spans for end in span.token_ends) == len(stopped.text) <= 6


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, pieces_tokenizer])
def test_token_ends_of_given_texts(tokenizer: object) -> None:
    engine = CocoaEngine(tiny_model("llama"), tokenizer())  # type: ignore[operator]
    text = " to be or not"
    (span,) = engine.score("abc", text).spans
    assert span.token_ends[-1] == len(text)
    assert len(span.token_ends) == len(span.token_ids)
    pieces = [text[a:b] for a, b in zip([0, *span.token_ends], span.token_ends, strict=False)]
    decoded = [engine.tokenizer.decode([token_id]).strip() for token_id in span.token_ids]
    assert [piece.strip() for piece in pieces] == decoded


def test_a_given_text_divided_at_its_risk_points() -> None:
    engine = engine_of(tiny_model("llama"))
    answer = engine.generate(prompt(3), method="greedy", max_new_tokens=24)
    divided = engine.score(prompt(3), answer.token_ids, divide=True)
    whole = engine.score(prompt(3), answer.token_ids)
    assert len(divided.spans) > 3
    assert divided.text == whole.text == "".join(span.text for span in divided.spans)
    assert divided.usage == whole.usage
    assert divided.token_ids == whole.token_ids
    margins = [margin for span in divided.spans for margin in span.token_margins]
    assert margins == whole.spans[0].token_margins
    starts = starts_of(divided)
    # greedy tokens are the most probable ones, so only competing tokens divide the text
    gamma = divided.config.gamma
    assert starts == [n for n, margin in enumerate(margins) if n == 0 or margin <= -math.log(gamma)]
    for span, start in zip(divided.spans, starts, strict=True):
        before = [*prompt(3), *answer.token_ids[:start]]
        alone = engine.score(before, span.token_ids).spans[0]
        assert span.f_mlds == near(alone.f_mlds)
        assert span.log_prob == near(alone.log_prob)
    many = engine.score(prompt(3), [answer.token_ids, answer.token_ids[:5]], divide=True)
    assert many[0] == divided
    assert many[1].token_ids == answer.token_ids[:5]


def test_an_unlikely_token_divides_a_text_and_rivals_refuse() -> None:
    engine = engine_of(tiny_model("llama"))
    greedy = engine.generate(prompt(3), method="greedy", max_new_tokens=8).token_ids
    changed = [*greedy[:3], (greedy[3] + 1) % 200 + 20, *greedy[4:]]
    divided = engine.score(prompt(3), changed, divide=True, gamma=1.0)  # no ties: only unlikely tokens divide
    assert 3 in starts_of(divided)
    with pytest.raises(ConfigError, match="divide"):
        engine.score(prompt(3), greedy, divide=True, method="diver")
