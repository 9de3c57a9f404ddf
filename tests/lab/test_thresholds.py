"""Thresholds: they reach what they promise, and the conformal one keeps its guarantee on prompts it has not seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine import CalibrationError
from cocoa_engine.lab.thresholds import choose, conformal, for_precision, for_recall, for_specificity, reached
from tests.helpers.made_up_risk import labelled_items, risk

SPANS = st.lists(
    st.tuples(st.integers(0, 8).map(lambda n: n / 8), st.booleans(), st.integers(0, 5)), min_size=1, max_size=40
).filter(lambda spans: any(label for _, label, _ in spans))
TARGETS = st.floats(0.05, 0.95)


@given(SPANS, TARGETS)
def test_recall_and_precision_are_reached_and_no_better_threshold_is(
    spans: list[tuple[float, bool, int]], target: float
) -> None:
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
def test_specificity_is_reached_and_no_lower_threshold_reaches_it(
    spans: list[tuple[float, bool, int]], target: float
) -> None:
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
def test_the_conformal_threshold_is_the_highest_that_meets_its_condition(
    spans: list[tuple[float, bool, int]], target: float
) -> None:
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


def test_too_few_prompts_flag_everything() -> None:
    assert conformal([0.2, 0.9], [False, True], ["a", "b"], 0.3) == 0.0
    assert conformal([0.2, 0.9], [False, True], ["a", "b"], 0.34) == 0.9
    assert conformal([0.2], [False], ["a"], 0.4) == 0.0


def test_bad_targets() -> None:
    for target in (0.0, 1.0, -1.0):
        with pytest.raises(CalibrationError, match="above 0 and below 1"):
            conformal([0.5], [True], ["a"], target)
    with pytest.raises(CalibrationError, match="needs spans"):
        conformal([], [], [], 0.1)
    for rule in ("precision", "recall"):
        with pytest.raises(CalibrationError, match="hallucinated spans"):
            choose(rule, 0.5, [0.5], [False], ["a"])  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_calibrator_keeps_its_threshold() -> None:
    spans = labelled_items(90)
    recall = risk(spans, threshold=("recall", 0.8)).threshold
    assert recall.recall >= 0.8
    assert recall.prompts == 90
    safe = risk(spans, threshold=("conformal", 0.2))
    assert safe.threshold.prompts == 30  # a third is not fitted on
    assert safe.validation.prompts == 60
