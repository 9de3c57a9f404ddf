"""Which value of a span is its risk, where calibrators apply, and prompts without a passage."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CalibrationWarning, CocoaConfig, CocoaEngine, Generation, RiskCalibrator
from cocoa_engine.errors import CalibrationError, ConfigError
from cocoa_engine.lab.data import LabelledSpan, LabelledText
from cocoa_engine.lab.measured import TeacherForced, labelled_features
from cocoa_engine.methods.retrieval_heads import heads_of_model
from cocoa_engine.model.prompts import ChatTokens
from cocoa_engine.risk import embedded_calibrator, policy
from cocoa_engine.risk.features import ANSWER_FEATURES, SPAN_FEATURES, answer_features, span_features
from cocoa_engine.risk.fitted import PROBABILITY_THRESHOLD, threshold_of
from cocoa_engine.risk.policy import RANK_THRESHOLD, reaches, right_answers_of, risk_measure, token_risk
from cocoa_engine.scoring.text_profile import Profiler
from cocoa_engine.spans import CLOSED_BOOK_TOKENS, Span
from tests.helpers.alike import near
from tests.helpers.backends import PROMPTS
from tests.helpers.inside import backend_inside
from tests.helpers.made_up_risk import SETTINGS, fitted, labelled_items, risk
from tests.helpers.paths import README
from tests.helpers.prompts import chat
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

CALIBRATE = README.parent / "docs" / "how-to" / "calibrate.md"
PROMPT = PROMPTS[2]
CONFIG = CocoaConfig(max_new_tokens=8, middle_layers=(0, 1))
OWN = SETTINGS.model_copy(update={"middle_layers": CONFIG.middle_layers})


def default(monkeypatch: pytest.MonkeyPatch, heads: object = ((1, 0),)) -> tuple[CocoaEngine, RiskCalibrator]:
    known = fitted(model_name="tiny", settings=OWN, levels=("span", "answer"), source=True, domain=True)
    known = known.model_copy(update={"heads": heads})
    monkeypatch.setattr(policy, "embedded_calibrator", lambda: known)
    return CocoaEngine(tiny_model("llama"), tiny_tokenizer(), model_name="tiny", config=CONFIG), known


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_where_it_applies_it_warns_once_of_what_is_out_of_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    one, known = default(monkeypatch)
    with pytest.warns(CalibrationWarning, match="out_of_domain"):
        generation = one.generate(PROMPT)
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::cocoa_engine.CalibrationWarning")
def test_parts_of_answers_have_no_risk_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    one, known = default(monkeypatch)
    of_spans = one.without_answer_risk().generate(PROMPT)
    assert one.with_calibrator(known).without_answer_risk().score(PROMPT, "abcd").answer_risk is None
    assert of_spans.calibrated
    assert of_spans.answer_risk is None
    assert one.calibrator is known
    assert one.without_calibrator().without_answer_risk().calibrator is None


def test_without_its_heads_and_where_attention_cannot_be_seen_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's attention is code of its own."""
    without = default(monkeypatch, heads=((99, 0),))[0]
    assert without.calibrator is None
    assert not without.generate(PROMPT).calibrated
    default(monkeypatch)
    one = CocoaEngine(tiny_model("falcon"), tiny_tokenizer(), model_name="tiny", config=CONFIG)
    plain = one.without_calibrator().generate(PROMPT)
    assert one.calibrator_for(CONFIG) is None
    generation = one.generate(PROMPT)
    assert generation.spans == plain.spans
    assert generation.risk_source == "token_probability"
    assert one.score(PROMPT, "abcd").risk_source == "token_probability"


def test_other_settings_or_heads_are_measured_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, _ = default(monkeypatch)
    others = heads_file(tmp_path, one.model, [(0, 1)])
    assert not one.generate(PROMPT, decore_heads=others).calibrated
    other = one.generate(PROMPT, gamma=0.2)
    assert not other.calibrated
    assert other == one.without_calibrator().generate(PROMPT, gamma=0.2)
    assert other.source_heads == "spread"  # the heads of the calibrator are not needed
    assert one.generate(PROMPT).source_heads is None


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


BY_LENGTH = {"short": [5] * CLOSED_BOOK_TOKENS, "long": [5] * (CLOSED_BOOK_TOKENS + 1)}


@pytest.fixture(scope="module")
def calibrator() -> RiskCalibrator:
    items = labelled_items(level="answer", seed=5)
    short = risk(items, data="short questions", threshold=("specificity", 0.8), folds=2)
    known = fitted(model_name="tiny", settings=OWN, levels=("span", "answer"))
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


def test_a_named_passage_is_one_however_short(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = heads_file(tmp_path, model, [(1, 0)])
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
    assert "NQ-Swap" in str(engine.chat([PASSAGE], max_new_tokens=8).calibrated_on)


SHORT: dict[str, Any] = {"max_new_tokens": 12}
TEXT = "the ring is a thing"


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
    assert tiny.calibrator is None
    named = CocoaEngine(tiny.model, tiny.tokenizer, model_name=embedded_calibrator().model_name)
    assert named.generate(TEXT, **SHORT).risk_source == "token_probability"  # other layers
    answers = [tiny.generate(TEXT, **SHORT), tiny.score(TEXT, "a thing is")]
    with tiny.stream(TEXT, **SHORT) as stream:
        streamed = list(stream)
    assert stream.generation == answers[0]
    assert streamed == answers[0].spans
    for answer in answers:
        threshold = right_answers_of(heads_of_model(None, tiny.session.model)).span_threshold
        assert (answer.risk_source, answer.threshold) == ("token_probability", threshold)
        assert not answer.calibrated
        for span in answer.spans:
            assert span.risk == pytest.approx(1 - math.exp(min(span.token_log_probs)))
            assert span.flagged == (span.risk >= threshold)
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
        tiny.generate(TEXT, risk="source_attention")
    assert tiny.generate(TEXT, source=["ring"], **SHORT).risk_source == "token_probability"
    heads = heads_of_model(None, engine.session.model)
    unmeasured = tiny.score(TEXT, "a thing").spans[0].model_copy(update={"token_source_attention": []})
    auto = risk_measure(CocoaConfig(), heads=heads, has_source=True)
    assert auto(unmeasured).source == "token_probability"
    assert risk_measure(CocoaConfig(risk="source_attention"), heads=heads)(unmeasured).value is None


@pytest.mark.parametrize("name", ["f_mlds", "con_mlds"])
def test_a_raw_mlds_is_the_risk_only_if_it_is_asked_for(tiny: CocoaEngine, name: Any) -> None:
    answer = tiny.generate(TEXT, risk=name, **SHORT)
    assert (answer.risk_source, answer.threshold) == (name, None)
    assert [span.risk for span in answer.spans] == [getattr(span, name) for span in answer.spans]
    assert not any(span.flagged for span in answer.spans)
    assert tiny.generate(TEXT, risk=name, max_risk=1.99, **SHORT).finish_reason != "risk"


def test_a_calibrated_risk_needs_a_calibrator(tiny: CocoaEngine) -> None:
    for call in (tiny.generate, tiny.stream, partial(tiny.score, text="a thing")):
        with pytest.raises(ConfigError, match="cocoa calibrate"):
            call(TEXT, risk="calibrator")
    answers_only = fitted(levels=("answer",))
    assert risk_measure(CocoaConfig(), answers_only).source == "token_probability"
    assert risk_measure(CocoaConfig(risk="f_mlds"), fitted()).source == "f_mlds"
    assert risk_measure(CocoaConfig(), fitted()).source == "calibrator"


@pytest.mark.filterwarnings("error")
def test_the_default_calibrator_is_that_of_the_embedded_model_and_its_settings(engine: CocoaEngine) -> None:
    """It is used without a warning where it fits, and left out without one where it does not."""
    by_name = CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator="embedded")
    fitting = engine.generate(TEXT, **SHORT)
    assert by_name.generate(TEXT, **SHORT) == fitting
    other = [engine.generate(TEXT, method="greedy", **SHORT), engine.generate(TEXT, gamma=0.2, **SHORT)]
    assert (fitting.risk_source, fitting.threshold) == ("calibrator", threshold_of(embedded_calibrator().span))
    assert 0 <= fitting.answer_risk <= 1
    assert [span.risk for span in fitting.spans] == [embedded_calibrator().risk(span) for span in fitting.spans]
    assert by_name.calibrator == RiskCalibrator.load("embedded")
    with pytest.warns(CalibrationWarning, match="the model is"):
        CocoaEngine(engine.model, engine.tokenizer, model_name="another", calibrator="embedded")
    assert {answer.risk_source for answer in other} == {"token_probability"}
    assert engine.calibrator_for(other[0].config) is None
    assert engine.without_calibrator().generate(TEXT, **SHORT).risk_source == "token_probability"
    assert engine.score(TEXT, " a thing").answer_risk is None  # it was fitted on the model's own answers


CAPITAL = chat("What is the capital of Australia?")
HESITANT = chat("Tell me about an island.")
BRIEF = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def made_up(engine: CocoaEngine) -> RiskCalibrator:
    return fitted(model_name=engine.model_name, levels=("span", "answer"))


@pytest.fixture
def calibrated(engine: CocoaEngine, made_up: RiskCalibrator) -> CocoaEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator=made_up)


def measured(item: Span | Generation, names: list[str]) -> list[float]:
    if isinstance(item, Span):
        values = dict(zip(SPAN_FEATURES, span_features(item), strict=True))
    else:
        values = dict(zip(ANSWER_FEATURES, answer_features(item), strict=True))
    return [values[name] for name in names]


def test_every_way_carries_it(engine: CocoaEngine, calibrated: CocoaEngine, made_up: RiskCalibrator) -> None:
    plain = engine.without_calibrator().generate(CAPITAL, risk="f_mlds", **BRIEF)
    generated = calibrated.generate(CAPITAL, **BRIEF)
    sources = generated.answer_risk_source, plain.answer_risk_source
    assert (generated.calibrated, plain.calibrated, *sources) == (True, False, "calibrator", "rank")
    for before, span in zip(plain.spans, generated.spans, strict=True):
        assert span.calibrated
        assert 0 <= span.risk <= 1
        assert span.risk == made_up.risk(span) == made_up.span(measured(before, made_up.span.features))
        assert before.risk == before.f_mlds
        assert span.model_copy(update={"risk": before.risk, "risk_source": "f_mlds", "flagged": False}) == before
    assert generated.answer_risk == made_up.answer_risk(plain)
    assert generated.answer_risk == made_up.answer(measured(plain, made_up.answer.features))
    assert 0 <= generated.answer_risk <= 1
    with calibrated.stream(CAPITAL, **BRIEF) as stream:
        assert [span.risk for span in stream] == near([span.risk for span in generated.spans])
    (batched,) = calibrated.generate_batch([CAPITAL], **BRIEF)
    assert batched.calibrated
    assert [stream.generation.answer_risk, batched.answer_risk] == near([generated.answer_risk] * 2)
    (scored,) = calibrated.score(CAPITAL, ["Canberra."])
    assert scored.calibrated
    assert scored.max_risk == made_up.risk(scored.spans[0])
    assert scored.answer_risk == made_up.answer_risk(scored)
    assert Generation.model_validate_json(scored.model_dump_json()) == scored
    alone = calibrated.score(CAPITAL, "Canberra.")
    assert [alone.answer_risk, made_up.answer_risk(engine.score(CAPITAL, "Canberra."))] == near(
        [scored.answer_risk] * 2
    )
    assert alone.usage.forward_passes == 1  # no candidates are grown for the risk of the answer
    plain_again = calibrated.without_calibrator()
    assert plain_again.calibrator is None
    assert backend_inside(plain_again) is backend_inside(calibrated)
    assert plain_again.without_calibrator() is plain_again
    again = plain_again.with_calibrator(made_up)
    assert (again.session, again.calibrator) == (calibrated.session, made_up)
    assert (calibrated.calibrator, plain_again.calibrator) == (made_up, None)


@pytest.mark.parametrize("level", ["span", "answer"])
def test_a_calibrator_of_one_level_leaves_the_other_as_it_is(engine: CocoaEngine, level: str) -> None:
    calibrator = fitted(model_name=engine.model_name, levels=(level,))
    judged = CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, calibrator=calibrator)
    scored = judged.score(CAPITAL, "Canberra.")
    assert scored.calibrated == (level == "span")
    assert (scored.answer_risk is None) == (level == "span")
    if level == "answer":
        assert scored.risk_source == "token_probability"
    missing, item = (calibrator.answer_risk, scored) if level == "span" else (calibrator.risk, scored.spans[0])
    with pytest.raises(CalibrationError, match="no risk of an answer" if level == "span" else "no risk of a span"):
        missing(item)


def test_features_of_spans_and_answers(engine: CocoaEngine) -> None:
    generation = engine.generate(CAPITAL, max_new_tokens=48)
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
    assert values["log_prompt_tokens"] == math.log1p(len(engine.encode(CAPITAL)))
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
    forced = TeacherForced(LabelledText("1", "1", generation.text, "?", None, parts, CAPITAL), profile, profile.ends)
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


@pytest.mark.filterwarnings("error")
def test_another_model_or_settings_warn_once(engine: CocoaEngine, calibrated: CocoaEngine, tmp_path: Path) -> None:
    calibrated.calibrator.save(tmp_path / "risk.json")
    with pytest.warns(CalibrationWarning, match=f"the model is another, not {engine.model_name}"):
        other = CocoaEngine(engine.model, engine.tokenizer, model_name="another", calibrator=tmp_path / "risk.json")
    with pytest.warns(CalibrationWarning, match="the model is another"):
        other.without_calibrator().with_calibrator(calibrated.calibrator)
    calibrated.score(CAPITAL, "Canberra.", alpha=1.0, max_new_tokens=3)  # nothing that it depends on
    assert other.score(CAPITAL, "Canberra.").calibrated  # it was said
    with pytest.warns(CalibrationWarning, match="final_layer is pre_norm, not post_norm"):
        calibrated.score(CAPITAL, "Canberra.", final_layer="pre_norm")
    with pytest.warns(CalibrationWarning, match=r"middle_layers is \(1, 2\), not \(10, 20\); gamma is 0.5"):
        calibrated.generate(CAPITAL, middle_layers=(1, 2), gamma=0.5, max_new_tokens=1)
    calibrated.generate(CAPITAL, middle_layers=(1, 2), max_new_tokens=1)
    calibrated.generate(CAPITAL, method="cocoa", metric="con_mlds", max_new_tokens=1)  # which have candidates, too
    with pytest.warns(CalibrationWarning, match="method='greedy' grows no candidates to compare"):
        calibrated.generate(CAPITAL, method="greedy", max_new_tokens=1)


@pytest.mark.filterwarnings("error")
def test_settings_are_looked_at_where_they_are_given(engine: CocoaEngine) -> None:
    settings = {"middle_layers": (20, 29), "final_layer": "pre_norm"}
    calibrator = fitted(model_name=engine.model_name, settings=SETTINGS.model_copy(update=settings))
    given = {"model_name": engine.model_name, "calibrator": calibrator}
    own = CocoaEngine(engine.model, engine.tokenizer, **given)  # its calls may have the calibrator's settings
    assert own.score(CAPITAL, "Canberra.", **settings).calibrated
    with pytest.warns(CalibrationWarning, match="final_layer is post_norm, not pre_norm"):
        own.score(CAPITAL, "Canberra.")
    with pytest.warns(CalibrationWarning, match="final_layer is post_norm, not pre_norm"):
        CocoaEngine(engine.model, engine.tokenizer, **given, config=CocoaConfig())


def test_what_is_no_calibrator(engine: CocoaEngine, tmp_path: Path) -> None:
    for make in (
        partial(CocoaEngine, engine.model, engine.tokenizer),
        CocoaEngine.from_pretrained,
        engine.with_calibrator,
    ):
        with pytest.raises(CalibrationError, match="cannot be read"):
            make(calibrator=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="RiskCalibrator or its file, not dict"):
        CocoaEngine(engine.model, engine.tokenizer, calibrator={})  # type: ignore[arg-type]


def test_thresholds_flag_spans(calibrated: CocoaEngine, made_up: RiskCalibrator) -> None:
    with_one = fitted(threshold=("recall", 0.5), levels=("span", "answer"))
    generation = calibrated.with_calibrator(with_one).score(CAPITAL, "Canberra.")
    (span,) = generation.spans
    assert span.flagged == (span.risk >= with_one.span.threshold.value)
    assert generation.threshold == with_one.span.threshold.value
    assert generation.answer_threshold == with_one.answer.threshold.value
    assert threshold_of(with_one.span) == with_one.span.threshold.value != PROBABILITY_THRESHOLD
    assert threshold_of(made_up.span) == PROBABILITY_THRESHOLD
