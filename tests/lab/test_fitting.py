"""Fitting and applying a calibrator, also on what a model makes itself of invented passages."""

import math
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cocoa_engine import CocoaConfig, CocoaEngine, fit_self_made
from cocoa_engine.errors import CalibrationError, UnsupportedModelError
from cocoa_engine.files import CACHE_VARIABLE
from cocoa_engine.lab import fit as lab_fit
from cocoa_engine.lab import heads as lab_heads
from cocoa_engine.lab import self_made
from cocoa_engine.lab.data import Question
from cocoa_engine.lab.fit import FitSettings, LabelledFeatures, fit, folds_of, left_out, validate
from cocoa_engine.lab.heads import KNOTS, PROMPTS, keep_reference, with_reference
from cocoa_engine.lab.measured import EXAMPLES, force, labelled_features, own_answers
from cocoa_engine.lab.self_made import made_spans, passages, planted_errors, until_steady
from cocoa_engine.lab.statistics import brier, expected_calibration_error, reliability
from cocoa_engine.methods import retrieval_heads
from cocoa_engine.methods.retrieval_heads import RetrievalHeads, heads_of_model, source_heads, spread_heads_of
from cocoa_engine.risk.features import SPAN_FEATURES, answer_features
from cocoa_engine.risk.fitted import FittedRisk, Isotonic
from tests.helpers.backends import made
from tests.helpers.inside import use_backend
from tests.helpers.made_up_risk import labelled_items, risk
from tests.helpers.rivals import heads_file
from tests.helpers.tiny_models import engine_of, tiny_model, tiny_tokenizer

COUNT = len(labelled_items(1).names)


@pytest.fixture(autouse=True)
def divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are divided into folds once, where a test does not ask for more."""
    monkeypatch.setattr(lab_fit, "MAX_REPEATS", 1)


FIGURES = st.lists(st.floats(-1e6, 1e6), min_size=COUNT, max_size=COUNT)


@pytest.mark.slow
@pytest.mark.parametrize(("isotonic", "level"), [(False, "span"), (True, "span"), (False, "answer")])
def test_it_ranks_and_calibrates_on_new_prompts(isotonic: bool, level: str) -> None:
    calibrated = risk(labelled_items(400, level=level), isotonic=isotonic, folds=3)
    fresh = labelled_items(800, level=level, seed=1)
    risks = [calibrated(row) for row in fresh.features.tolist()]
    assert expected_calibration_error(reliability(risks, fresh.labels)) < 0.04
    assert brier(risks, fresh.labels) < brier(np.full(len(risks), fresh.labels.mean()), fresh.labels) - 0.04
    found = calibrated.validation
    assert found.auroc.low <= found.auroc.estimate <= found.auroc.high
    assert found.auroc.estimate > max(rival.auroc.estimate for rival in found.rivals.values())
    assert found.rivals["fMLDS"].difference.low > 0
    assert found.brier < found.brier_of_base_rate
    assert (found.prompts, found.items, found.repeats) == (400, 2400, 1)
    assert sum(part.items for part in found.reliability) == pytest.approx(2400, abs=5)
    if not isotonic:
        noise = risk(labelled_items(200, signal=0.0, level=level), folds=3).validation
        assert 0.4 < noise.auroc.estimate < 0.56
        assert noise.brier > noise.brier_of_base_rate - 0.005


@pytest.mark.slow
def test_what_is_the_same_for_a_prompt_is_not_learnt_by_heart() -> None:
    """Each prompt has a label and a mark of its own: only folds that part prompts show that this is worth nothing."""
    random = np.random.default_rng(0)
    marks = random.normal(size=(80, len(SPAN_FEATURES))).repeat(5, axis=0)
    labels = (random.random(80) < 0.5).repeat(5)
    spans = LabelledFeatures(SPAN_FEATURES, marks, labels, [str(number // 5) for number in range(400)])
    assert 0.3 < risk(spans).validation.auroc.estimate < 0.65
    risks, folds = left_out(spans, isotonic=False)
    assert all(len(set(folds[number * 5 : number * 5 + 5])) == 1 for number in range(80))
    assert all(len(set(risks[number * 5 : number * 5 + 5])) == 1 for number in range(80))


@cache
def known_risk(*, isotonic: bool) -> FittedRisk:
    return risk(isotonic=isotonic, folds=2)


@pytest.mark.slow
@pytest.mark.parametrize("isotonic", [False, True])
def test_plain_python_applies_what_scikit_learn_fitted(isotonic: bool) -> None:
    spans, calibrated = labelled_items(), known_risk(isotonic=isotonic)
    rows = spans.features.tolist()
    plains = []
    for strength in lab_fit.INVERSE_STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        plains.append(model.fit(spans.features, spans.labels).predict_proba(spans.features)[:, 1])
    raw = calibrated.model_copy(update={"isotonic": None})
    (plain,) = (one for one in plains if np.allclose([raw(row) for row in rows], one, atol=1e-9))
    expected = plain if calibrated.isotonic is None else np.interp(plain, calibrated.isotonic.x, calibrated.isotonic.y)
    assert [calibrated(row) for row in rows] == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
@given(FIGURES, st.booleans())
def test_a_risk_is_in_the_unit_interval_and_survives_json(figures: list[float], isotonic: bool) -> None:
    calibrated = known_risk(isotonic=isotonic)
    read = FittedRisk.model_validate_json(calibrated.model_dump_json())
    assert read == calibrated
    assert 0 <= calibrated(figures) <= 1
    assert read(figures) == calibrated(figures)
    place = calibrated.features.index("f_mlds")
    assert calibrated.weights[place] > 0
    risks = [calibrated([*figures[:place], value, *figures[place + 1 :]]) for value in np.linspace(-5, 5, 50).tolist()]
    assert risks == sorted(risks)  # more of a risky feature is never less risk


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12, unique_by=lambda knot: knot[0]),
    st.lists(st.floats(-0.5, 1.5), min_size=2, max_size=20),
)
def test_an_isotonic_map_never_falls(knots: list[tuple[float, float]], values: list[float]) -> None:
    x, y = (sorted(column) for column in zip(*knots, strict=True))
    curve = Isotonic(x=x, y=y)
    mapped = [curve(value) for value in sorted(values)]
    assert mapped == sorted(mapped)
    assert min(y) <= mapped[0] <= mapped[-1] <= max(y)
    assert [curve(value) for value in x] == y


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "folds of a cross-validation need at least 10"),
        ({"labels": np.full(48, True)}, "0 prompts have supported"),
        ({"features": np.full((48, COUNT), np.inf)}, "not finite"),
    ],
)
def test_what_cannot_be_fitted(changes: dict[str, Any], message: str) -> None:
    items = labelled_items(8) if not changes else replace(labelled_items(48, 1), **changes)
    with pytest.raises(CalibrationError, match=message):
        risk(items)


def test_calibration_figures_by_hand() -> None:
    risks, labels = [0.1, 0.1, 0.9, 0.9], [False, False, True, False]
    assert brier(risks, labels) == pytest.approx((0.01 + 0.01 + 0.01 + 0.81) / 4)
    low, high = reliability(risks, labels)
    assert (low.items, low.mean_risk, low.share_hallucinated) == (2, pytest.approx(0.1), 0)
    assert (high.items, high.mean_risk, high.share_hallucinated) == (2, pytest.approx(0.9), 0.5)
    assert expected_calibration_error([low, high]) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_every_item_is_in_one_bin(items: list[tuple[float, bool]]) -> None:
    risks, labels = map(list, zip(*items, strict=True))
    curve = reliability(risks, labels)
    assert sum(one.items for one in curve) == len(items)
    assert sum(one.items * one.share_hallucinated for one in curve) == pytest.approx(sum(labels))
    assert 0 <= expected_calibration_error(curve) <= 1


def states_of(items: LabelledFeatures, *, signal: float, size: int = 40) -> LabelledFeatures:
    """Items with hidden states after two layers, of which one direction of the second depends on the labels."""
    random = np.random.default_rng(3)
    states = random.normal(size=(len(items.labels), 2, size)) * np.linspace(0.1, 30, size)
    states[:, 1, 5] += signal * items.labels * states[:, 1, 5].std()
    return replace(items, states=states.astype(np.float32))


def test_a_direction_is_that_of_a_ridge_regression() -> None:
    items = states_of(labelled_items(), signal=1.0)
    direction, scores = lab_fit.fit_direction(items.states, items.labels, folds_of(items, 5))
    assert direction.at == 1
    scaled = StandardScaler().fit_transform(items.states[:, 1])
    found = []
    for strength in lab_fit.STRENGTHS:
        model = Ridge(alpha=strength * len(items.labels)).fit(scaled, items.labels)
        found.append(np.allclose(lab_fit.scores_of(direction, items.states), model.predict(scaled), atol=1e-4))
    assert sum(found) == 1
    # the cross-fitted scores are of directions that did not see the item's prompt
    rest, fold = folds_of(items, 5)[0]
    model = Ridge(alpha=lab_fit.STRENGTHS[found.index(True)] * len(rest)).fit(scaled[rest], items.labels[rest])
    assert scores[fold] == pytest.approx(model.predict(scaled[fold]), abs=1e-4)


@pytest.mark.slow
def test_a_probe_adds_what_the_states_know_and_no_more() -> None:
    items = labelled_items(60, signal=0.3)
    plain = left_out(items, isotonic=False)
    informed = left_out(states_of(items, signal=1.5), isotonic=False)
    noisy = left_out(states_of(items, signal=0.0, size=300), isotonic=False)

    def auroc(found: tuple[np.ndarray, np.ndarray]) -> float:
        return validate(items, *found, draws=20, seed=0).auroc.estimate

    assert auroc(informed) > auroc(plain) + 0.1
    assert auroc(noisy) > auroc(plain) - 0.05  # its score is cross-fitted, or it would be trusted blindly
    fitted, _ = fit(states_of(items, signal=1.5), "made up", FitSettings(draws=20))
    assert fitted.features[-1] == "probe"
    assert fitted.weights[-1] > 0
    with pytest.raises(CalibrationError, match="not measured here, but needed: probe"):
        lab_fit.risks_of(fitted, items)


def test_folds_have_both_classes_and_no_prompt_twice() -> None:
    """Also with versions of scikit-learn that no longer stratify when they shuffle."""
    prompts = [f"prompt {number}" for number in range(14)]
    items = LabelledFeatures(["nothing"], np.zeros((14, 1)), np.arange(14) % 2 == 1, prompts)
    divided = [folds_of(items, 2, seed) for seed in range(5)]
    for folds in divided:
        assert sorted(int(items.labels[fold].sum()) for _, fold in folds) == [3, 4]
        for rest, fold in folds:
            assert not {items.groups[at] for at in rest} & {items.groups[at] for at in fold}
    assert len({tuple(folds[0][1]) for folds in divided}) > 1


def test_the_domain_keeps_99_percent_of_left_out_items_inside() -> None:
    items = labelled_items(100, each=8)
    scaled = (items.features - items.features.mean(axis=0)) / items.features.std(axis=0)
    domain = lab_fit.fit_domain(scaled, folds_of(items, 5))
    fresh = labelled_items(100, each=8, seed=1).features
    assert 0.97 < np.mean([not domain.is_outside(row) for row in fresh.tolist()]) < 1
    for far in ([6.0] * COUNT, [math.inf] * COUNT, [0.0, 0.0, 0.0, 12.0] + [0.0] * (COUNT - 4)):
        assert domain.is_outside(far)


@pytest.mark.slow
def test_few_items_are_divided_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is the mean over divisions, each of which leaves every prompt out once."""
    monkeypatch.undo()
    items = labelled_items(40, each=4)
    found = risk(items).validation
    assert (found.repeats, found.folds, found.prompts, found.items) == (5, 5, 40, 160)
    assert found.hallucinated == items.labels.sum()
    once = [validate(items, *left_out(items, isotonic=False, seed=seed), draws=20, seed=0) for seed in range(5)]
    assert len({one.auroc.estimate for one in once}) > 1
    assert found.brier == pytest.approx(np.mean([one.brier for one in once]))
    assert found.auroc.estimate == pytest.approx(np.mean([one.auroc.estimate for one in once]), abs=0.01)
    assert 0.02 < found.auroc.high - found.auroc.low < 0.4  # of 40 prompts, not of 200


@pytest.mark.slow
def test_items_of_two_data_sets_are_not_ranked_against_each_other() -> None:
    """A feature that only tells the sets apart, one mostly hallucinated, is worth nothing within a set."""
    random = np.random.default_rng(0)
    sets = []
    for share, mark in ((0.8, 3.0), (0.2, -3.0)):
        items = labelled_items(40, signal=0.0)
        features = random.normal(size=items.features.shape)
        features[:, 0] = mark
        sets.append(replace(items, features=features, labels=random.random(len(items.labels)) < share))
    found = risk(LabelledFeatures.pooled(sets)).validation
    assert found.folds == 5
    assert 0.4 < found.auroc.estimate < 0.6
    assert found.brier < found.brier_of_base_rate - 0.05  # it is calibrated in both


def test_exact_risks_of_few_items_have_an_ece() -> None:
    """Of 20 items in a bin with probability 1/2, the share is off by 2 E|k - 10| / 40 = 0.088 on average."""
    ece_if_exact = run_path(str(Path(__file__).parents[2] / "docs/how-to/trials/short_answers.py"))["ece_if_exact"]
    assert ece_if_exact(np.linspace(0.499, 0.501, 200)) == pytest.approx(0.088, abs=0.003)
    assert ece_if_exact(np.linspace(0.499, 0.501, 20_000), draws=50) == pytest.approx(0.009, abs=0.002)
    assert ece_if_exact([0.0] * 100 + [1.0] * 100) == 0


def test_a_passage_states_some_facts_and_not_the_others() -> None:
    drawn = list(islice(passages(3), 300))
    for passage in drawn:
        assert len(passage.stated) == self_made.STATED
        assert passage.missing
        assert "{" not in passage.text
        for fact in passage.stated:
            assert fact.sentence in passage.text
            assert fact.answers[0].lower() in fact.sentence.lower()
            assert fact.question.endswith("?")
        for fact in passage.missing:
            assert fact.sentence not in passage.text
            if len(fact.answers[0]) > 6:  # small numbers may occur in another fact
                assert fact.answers[0] not in passage.text
    assert len({passage.text for passage in drawn}) == 300
    assert len({passage.stated[0].question.split()[0] for passage in drawn}) >= 5


@pytest.mark.parametrize(
    ("answer", "right", "declines"),
    [
        ("It was built by Mirela Voss.", True, False),
        ("It was Voss.", True, False),
        ("It was built by Pavel Lund.", False, False),
        ("The text does not say.", False, True),
        ("It is not mentioned in the passage.", False, True),
        ("There is no information about the mayor.", False, True),
        ("I cannot answer this.", False, True),
        ("The passage doesn't specify it.", False, True),
        ("unknown", False, True),
        ("It is known for its clocks.", False, False),
        ("She was not born in Rome.", False, False),
        ("", False, False),
    ],
)
def test_a_right_answer_is_known_or_declines(answer: str, right: bool, declines: bool) -> None:
    """If the passage does not tell, the answer is right that declines."""
    for answers, expected in ((("Mirela Voss", "Voss"), right), ((), declines)):
        assert Question("Who built the mill of Odd?", "x", answers, "g").is_right(answer) is expected


def test_planted_errors() -> None:
    texts = planted_errors(200, seed=2)
    assert texts == planted_errors(200, seed=2) != planted_errors(200, seed=3)
    planted = clean = 0
    for one, passage in zip(texts, passages(2), strict=False):
        assert passage.text in one.prompt
        assert passage.text in one.question
        stated = {fact.answers[0].lower() for fact in passage.stated}
        for span in one.spans:
            value = one.text[span.start : span.end].lower()
            assert value.strip() == value != ""
            planted += 1
            if len(value) > 6:
                assert value not in stated
                assert value not in passage.text.lower()
        marked = "".join("#" if any(s.start <= n < s.end for s in one.spans) else c for n, c in enumerate(one.text))
        clean += sum(value in marked.lower() for value in stated)
        assert "{" not in one.text
    assert planted == pytest.approx(0.4 * 800, rel=0.15)
    assert clean >= 0.55 * 800


def test_features_are_those_of_the_answers() -> None:
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer())
    config = CocoaConfig(max_new_tokens=12, max_risk=0.1, max_candidates=2)
    asked = [Question(text, None, ("never",), text) for text in ("a?", "b?", "c?")]
    prompts = [f"{EXAMPLES}{question.request}\nAnswer:" for question in asked]
    expected = [engine.generate(prompt, config=config.replace(max_risk=None, stop=("\n",))) for prompt in prompts]
    questions = [asked[0], replace(asked[1], answers=(expected[1].text,)), asked[2]]
    done: list[int] = []
    answers = own_answers(engine, questions, config, advance=done.append)
    assert sum(done) == 3
    names = len(answers.names)  # the tiny model has no known heads, hence no source attention
    assert np.allclose(answers.features, [answer_features(answer)[:names] for answer in expected], atol=1e-3)
    assert answers.labels.tolist() == [True, False, True]


def test_features_are_those_of_the_texts_that_rounds_divide() -> None:
    engine = CocoaEngine(tiny_model("llama", max_position_embeddings=2048), tiny_tokenizer())
    config, done = CocoaConfig(max_candidates=2), list[int]()
    spans = made_spans(engine, 3, config, rounds=2, seed=5, advance=done.append)
    assert sum(done) == 3
    texts = planted_errors(3, seed=5)
    fed = labelled_features(force(engine, [texts[number] for number in (0, 2, 1)], config), config, 6)["span"]
    assert np.allclose(spans.features, fed.features, atol=1e-3)
    assert spans.labels.tolist() == fed.labels.tolist()
    assert len({*spans.groups}) == len({*fed.groups}) == 3


def ranked_items(prompts: int, shift: float, seed: int = 0) -> LabelledFeatures:
    """One item for each prompt; half are hallucinated, whose feature is higher by ``shift`` standard deviations."""
    labels = np.arange(prompts) % 2 == 0
    values = np.random.default_rng(seed).normal(size=(prompts, 1)) + shift * labels[:, None]
    return LabelledFeatures(["x"], values, labels, [str(number) for number in range(prompts)])


@pytest.mark.parametrize(
    ("sizes", "shift", "read"),
    [
        ((18, 19, 400), 5.0, 3),  # 10 prompts of each class are needed, and two such rounds
        ((400, 402, 404), 0.5, 2),
        ((40, 400, 4000), 5.0, 2),  # separated in each
        ((18, 18, 18), 0.5, 3),
        ((18,), 0.5, 1),
    ],
)
def test_rounds_end_when_the_auroc_is_steady(
    sizes: tuple[int, ...], shift: float, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[LabelledFeatures] = []
    ranked: list[LabelledFeatures] = []

    def take(size: int) -> LabelledFeatures:
        taken.append(ranked_items(size, shift))
        return taken[-1]

    def rank(items: LabelledFeatures) -> float:
        ranked.append(items)
        return lab_fit.auroc_left_out(items)

    monkeypatch.setattr(self_made, "auroc_left_out", rank)
    assert until_steady(sizes, take) is taken[-1]
    assert len(taken) == read
    assert len(ranked) == min(read, len(sizes) - 1), "the last round is not ranked"


def test_rounds_go_on_while_the_auroc_changes() -> None:
    rounds = [ranked_items(400, shift) for shift in (0.0, 0.5, 1.0, 2.0)]
    assert until_steady(range(4), rounds.__getitem__) is rounds[-1]


def test_fitting_on_planted_errors(engine: CocoaEngine) -> None:
    fitted = fit_self_made(engine, count=15, settings=FitSettings(draws=20, folds=2))
    assert fitted.answer is None
    assert fitted.span.data == "made by the model itself: 15 retellings of invented passages with planted errors"
    assert fitted.model_name == engine.model_name
    answer = engine.with_calibrator(fitted).generate("Question: Who wrote Dune?\nAnswer:", max_new_tokens=10)
    assert answer.risk_source == "calibrator"
    assert answer.answer_risk_source == "rank"
    with pytest.raises(CalibrationError, match="prompts have hallucinated items"):
        fit_self_made(engine, count=3)


def tiny_with_heads(folder: Path) -> tuple[CocoaEngine, RetrievalHeads]:
    model = tiny_model("llama", max_position_embeddings=2048)
    engine = use_backend(CocoaEngine(model, tiny_tokenizer()), made(model, "lean", "stock"))
    return engine, RetrievalHeads.model_validate_json(Path(heads_file(folder, model)).read_text())


@pytest.mark.slow
def test_the_reference_is_that_of_the_models_own_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 5)
    engine, heads = tiny_with_heads(tmp_path)
    done: list[int] = []
    found = with_reference(engine, heads, prompts=4, advance=done.append)
    assert sum(done) == 4
    assert found.heads == heads.heads
    assert len(found.reference) == KNOTS
    file = tmp_path / "heads.json"
    file.write_text(heads.model_dump_json())
    values = []
    for passage in islice(passages(0), 2):
        question = f"Answer the question from the text, in one sentence.\nQuestion: {passage.stated[0].question}"
        prompts = [f"{passage.text}\n\n{task}\nAnswer:" for task in ("Summarise the text in two sentences.", question)]
        for answer in engine.generate_batch(prompts, max_new_tokens=48, decore_heads=str(file)):
            values += [span.source_attention for span in answer.spans if any(map(str.isalnum, span.text))]
    assert found.reference_spans == len(values)
    assert found.reference == pytest.approx(np.quantile(values, np.linspace(0, 1, KNOTS)), abs=1e-3)  # type: ignore[arg-type]
    ranks = [found.rank(value) for value in values]
    assert np.mean(ranks) == pytest.approx(0.5, abs=0.05)  # type: ignore[arg-type]


def test_too_few_spans_and_their_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 1000)
    engine, heads = tiny_with_heads(tmp_path)
    for asked, message in (
        (engine_of(tiny_model("falcon")), r"wrote 0 spans with a known .* may not be visible"),
        (engine, r"at least 1000 are needed\. Take more prompts \(60 by default\)\."),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            with_reference(asked, heads, prompts=1)


@pytest.mark.slow
def test_a_reference_is_kept_for_models_that_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(lab_heads, "MIN_SPANS", 5)
    monkeypatch.setattr(lab_heads, "MAX_NEW_TOKENS", 4)
    engine = tiny_with_heads(tmp_path)[0]
    done: list[int] = []
    file = keep_reference(engine, advance=done.append)
    assert sum(done) == PROMPTS
    assert file.is_relative_to(tmp_path)
    model = engine.session.model
    assert heads_of_model(None, model).reference is not None
    assert source_heads(None, model) == spread_heads_of(model).best(retrieval_heads.SOURCE_HEADS)  # type: ignore[union-attr]
    assert keep_reference(engine) is None  # it is known now
    assert keep_reference(engine_of(tiny_model("mamba"))) is None
