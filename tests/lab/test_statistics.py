"""Rankings and the bootstrap against scikit-learn and sums by hand; thresholds and times."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from cocoa_engine import CalibrationError, DataError
from cocoa_engine.equations import middle_layers
from cocoa_engine.lab.fit import FitSettings
from cocoa_engine.lab.indicators import layer_choices
from cocoa_engine.lab.measured import Layers
from cocoa_engine.lab.statistics import (
    Bootstrap,
    Ranked,
    caution,
    choose,
    conformal,
    for_precision,
    for_recall,
    for_specificity,
    interval,
    reached,
)
from cocoa_engine.lab.timing import Spread, Turn, measured_rounds, ratio, timed
from tests.helpers.made_up_risk import labelled_items, risk

SCORES = st.integers(-3, 3).map(float)  # ties are common
ITEMS = st.lists(st.tuples(SCORES, st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=30).filter(
    lambda items: any(p for _, p, _ in items) and any(n for _, _, n in items)
)


@pytest.mark.slow
@given(ITEMS)
def test_weighted_figures_are_scikit_learns(items: list[tuple[float, int, int]]) -> None:
    scores, positive, negative = map(list, zip(*items, strict=True))
    ranked = Ranked(scores, positive, negative)
    labels, weights = [1] * len(items) + [0] * len(items), [*positive, *negative]
    assert ranked.auroc()[0] == pytest.approx(roc_auc_score(labels, scores * 2, sample_weight=weights))
    assert ranked.auprc()[0] == pytest.approx(average_precision_score(labels, scores * 2, sample_weight=weights))


@given(ITEMS, st.integers(1, 4), st.floats(-9, 9))
def test_strata_are_ranked_alone(items: list[tuple[float, int, int]], number: int, shift: float) -> None:
    columns = [np.array(column, dtype=float) for column in zip(*items, strict=True)]
    strata = np.arange(len(items)) % number
    parts = [[column[strata == stratum] for column in columns] for stratum in range(number)]
    parts = [part for part in parts if len(part[0]) and part[1].any() and part[2].any()]
    if not parts:
        with pytest.raises(DataError, match="both hallucinated"):
            Ranked(*columns, strata)
        return
    within, moved = Ranked(*columns, strata), Ranked(columns[0] + shift * strata, *columns[1:], strata)
    pairs = [part[1].sum() * part[2].sum() for part in parts]
    assert within.auroc()[0] == pytest.approx(np.average([Ranked(*part).auroc()[0] for part in parts], weights=pairs))
    found = [part[1].sum() for part in parts]
    assert within.auprc()[0] == pytest.approx(np.average([Ranked(*part).auprc()[0] for part in parts], weights=found))
    assert moved.auroc()[0] == pytest.approx(within.auroc()[0])  # what tells the strata apart does not count
    # a draw is the same as repeating its items
    counts = (np.arange(len(items)) % 3)[None].astype(float)
    repeated = [np.repeat(column, counts[0].astype(int)) for column in (*columns, strata)]
    try:
        expected = [Ranked(*repeated).auroc()[0], Ranked(*repeated).auprc()[0]]
    except DataError:
        expected = [np.nan] * 2
    assert [within.auroc(counts)[0], within.auprc(counts)[0]] == pytest.approx(expected, nan_ok=True)


@given(ITEMS, st.integers(2, 5), st.integers(0, 3))
def test_intervals_hold_the_estimate(items: list[tuple[float, int, int]], groups: int, seed: int) -> None:
    scores, positive, negative = map(list, zip(*items, strict=True))
    ranked, other = Ranked(scores, positive, negative), Ranked(positive, positive, negative)
    bootstrap = Bootstrap([number % groups for number in range(len(items))], draws=40, seed=seed)
    for measure in ("auroc", "auprc"):
        interval, difference = bootstrap.interval(ranked, measure), bootstrap.difference(ranked, other, measure)
        assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
        assert -1 <= difference.low <= difference.estimate <= difference.high <= 1
        assert bootstrap.difference(ranked, ranked, measure) == (0, 0, 0)


def test_the_interval_has_its_coverage() -> None:
    """Normal scores whose true AUROC is known: a 95 % interval misses it about once in twenty times."""
    random = np.random.default_rng(0)
    true = 0.5 * (1 + math.erf(1 / 2))  # P(N(1, 1) > N(0, 1))
    hits = 0
    for trial in range(100):
        labels = random.random(200) < 0.4
        bootstrap = Bootstrap(range(200), draws=200, seed=trial)
        found = bootstrap.interval(Ranked(random.normal(size=200) + labels, labels, ~labels), "auroc")
        hits += found.low <= true <= found.high
    assert 88 <= hits <= 99


def test_groups_are_drawn_whole() -> None:
    """Copies of an answer are one observation: they do not make the interval narrower."""
    random = np.random.default_rng(1)
    labels = random.random(60) < 0.5
    scores = random.normal(size=60) + labels
    alone = Bootstrap(range(60), 400).interval(Ranked(scores, labels, ~labels), "auroc")
    copies = Ranked(np.repeat(scores, 9), np.repeat(labels, 9), np.repeat(~labels, 9))
    assert Bootstrap(np.repeat(range(60), 9).tolist(), 400).interval(copies, "auroc") == pytest.approx(alone)
    naive = Bootstrap(range(540), 400).interval(copies, "auroc")
    assert naive.high - naive.low < 0.5 * (alone.high - alone.low)


def test_what_cannot_be_ranked_and_one_prompt_which_has_no_interval() -> None:
    """All draws of it are the same: they say nothing of how it would be with others."""
    for bad in (([1.0, math.nan], [1, 0], [0, 1]), ([1.0, 2.0], [1, 1], [0, 0]), ([1.0], [0], [1]), ([], [], [])):
        with pytest.raises(DataError):
            Ranked(*bad)
    assert interval(0.7, np.array([math.nan])) == (0.7, None, None)
    ranked = Ranked([3.0, 2.0, 1.0], [1, 0, 1], [0, 1, 0])
    alone = Bootstrap(["a", "a", "a"], draws=30)
    for figure in (alone.interval(ranked, "auroc"), alone.difference(ranked, ranked, "auroc")):
        assert (figure.low, figure.high) == (None, None)
    assert alone.interval(ranked, "auroc").shown() == "0.500"
    assert Bootstrap(["a", "b", "a"], draws=30).interval(ranked, "auroc").shown().startswith("0.500 (")
    assert "only one" in caution(1)
    assert "only 9 prompts" in caution(9)
    assert caution(10) is None


@given(st.integers(3, 200))
def test_each_choice_of_layers_is_compared_once(num_layers: int) -> None:
    own = Layers((1, 2), "post_norm")
    choices = list(layer_choices(num_layers, own).values())
    assert own in choices
    assert Layers(middle_layers(num_layers), "pre_norm") in choices
    assert all(0 <= one.window[0] <= one.window[1] < num_layers for one in choices)


def test_rivals_take_turns_and_another_begins_each_time() -> None:
    """A round is weighed as a whole: seconds over units of all its work, not the mean of each piece's quotient."""
    order: list[str] = []

    def rival(name: str, seconds: float, case: int) -> Turn:
        order.append(f"{name}{case}")
        return Turn(seconds, case)

    ticks: list[None] = []
    ways = {"a": partial(rival, "a", 6.0), "b": partial(rival, "b", 3.0)}
    rounds = measured_rounds(ways, [[1, 2], [3]], lambda: ticks.append(None))
    assert list(rounds) == [{"a": 4.0, "b": 2.0}, {"a": 2.0, "b": 1.0}]
    assert order == ["a1", "b1", "b2", "a2", "a3", "b3"]
    assert len(ticks) == len(order)
    assert timed(len)("four").units == 4
    assert ratio([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == Spread(median=1.0, lowest=0.5, highest=2.0)
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


SPANS = st.lists(
    st.tuples(st.integers(0, 8).map(lambda n: n / 8), st.booleans(), st.integers(0, 5)), min_size=1, max_size=40
).filter(lambda spans: any(label for _, label, _ in spans))
TARGETS = st.floats(0.05, 0.95)


@given(SPANS, TARGETS)
def test_recall_and_precision_are_reached(spans: list[tuple[float, bool, int]], target: float) -> None:
    risks, labels, _ = map(list, zip(*spans, strict=True))
    threshold = for_recall(risks, labels, target)
    assert reached(risks, labels, threshold)[1] >= target - 1e-9
    higher = [risk for risk in risks if risk > threshold]
    assert all(reached(risks, labels, risk)[1] < target for risk in higher)
    precisions = {risk: reached(risks, labels, risk)[0] for risk in set(risks)}
    good = [risk for risk, precision in precisions.items() if precision is not None and precision >= target]
    if good:
        assert for_precision(risks, labels, target) == min(good)
    else:
        with pytest.raises(CalibrationError, match="the highest is"):
            for_precision(risks, labels, target)


@given(SPANS, TARGETS)
def test_specificity_is_reached(spans: list[tuple[float, bool, int]], target: float) -> None:
    risks, labels, _ = (np.array(column) for column in zip(*spans, strict=True))
    supported = risks[~labels]
    if not len(supported):
        with pytest.raises(CalibrationError, match="needs supported spans"):
            for_specificity(risks, labels, target)
        return

    def unflagged(threshold: float) -> float:
        return float((supported < threshold).mean())

    found = for_specificity(risks, labels, target)
    assert unflagged(found) >= target - 1e-9
    assert all(unflagged(risk) < target for risk in supported if risk < found)
    assert found not in risks  # so that rounding flags nothing else


def loss(risks: np.ndarray, labels: np.ndarray, threshold: float) -> float:
    """Of one prompt: the share of its hallucinated spans that are missed."""
    return float((risks[labels] < threshold).mean()) if labels.any() else 0.0


@given(SPANS, TARGETS)
def test_the_conformal_threshold_is_the_highest(spans: list[tuple[float, bool, int]], target: float) -> None:
    risks, labels, groups = (np.array(column) for column in zip(*spans, strict=True))
    names = set(groups.tolist())
    n = len(names)

    def met(threshold: float) -> bool:
        total = sum(loss(risks[groups == name], labels[groups == name], threshold) for name in names)
        return bool((total + 1) / (n + 1) <= target + 1e-12)

    found = conformal(risks, labels, groups.tolist(), target)
    assert met(found) or found == 0
    assert not any(met(risk) for risk in risks[labels] if risk > found + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.1, 0.3])
@pytest.mark.parametrize("power", [0.0, 2.0])
def test_the_guarantee_holds_on_new_prompts(target: float, power: float) -> None:
    """Prompts are drawn alike; each has its own share of hallucinated spans. Risks may even be pure noise."""
    random = np.random.default_rng(3)

    def prompt() -> tuple[np.ndarray, np.ndarray]:
        labels = random.random(random.integers(1, 12)) < random.beta(1, 3)
        return 1 / (1 + np.exp(-random.normal(size=len(labels)) - power * labels)), labels

    losses, flagged = [], []
    for _ in range(400):
        chosen_on = [prompt() for _ in range(40)]
        groups = [number for number, (_, labels) in enumerate(chosen_on) for _ in labels]
        risks, labels = (np.concatenate(column) for column in zip(*chosen_on, strict=True))
        threshold = conformal(risks, labels, groups, target)
        for risks, labels in (prompt() for _ in range(10)):
            losses.append(loss(risks, labels, threshold))
            flagged.append(float((risks >= threshold).mean()))
    error = float(np.std(losses)) / np.sqrt(len(losses))
    assert np.mean(losses) <= target + 3 * error
    assert np.mean(losses) >= target - 0.06  # and it is not bought by flagging everything
    assert np.mean(flagged) < 0.95


def test_too_few_prompts_flag_everything_and_bad_targets() -> None:
    assert conformal([0.2, 0.9], [False, True], ["a", "b"], 0.3) == 0.0
    assert conformal([0.2, 0.9], [False, True], ["a", "b"], 0.34) == 0.9
    assert conformal([0.2], [False], ["a"], 0.4) == 0.0
    for target in (0.0, 1.0, -1.0):
        with pytest.raises(CalibrationError, match="above 0 and below 1"):
            FitSettings(threshold=("conformal", target))
    with pytest.raises(CalibrationError, match="needs spans"):
        conformal([], [], [], 0.1)
    for rule in ("precision", "recall"):
        with pytest.raises(CalibrationError, match="hallucinated spans"):
            choose(rule, 0.5, [0.5], [False], ["a"])  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_calibrator_keeps_its_threshold() -> None:
    spans = labelled_items(90)
    recall = risk(spans, threshold=("recall", 0.8), folds=2).threshold
    assert recall.recall >= 0.8
    assert recall.prompts == 90
    safe = risk(spans, threshold=("conformal", 0.2), folds=2)
    assert safe.threshold.prompts == 30  # a third is not fitted on
    assert safe.validation.prompts == 60
