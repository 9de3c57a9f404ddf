"""Cascades of two models: what thresholds cost and give, and the page that shows it."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import cascade
from benchmarks.cascade import ANSWERS, FIGURE, MODELS, Pairs, figure, tables
from benchmarks.own_answers import read
from benchmarks.rag_questions import KINDS, RagQuestion
from cocoa_engine import CocoaEngine
from tests.helpers.tiny_models import tiny_model


@pytest.fixture(params=range(5))
def pairs(request: pytest.FixtureRequest) -> Pairs:
    """30 questions of each kind, with risks that repeat."""
    random = np.random.default_rng(request.param)
    rows = [
        {
            "model": model,
            "id": f"{number}-{kind}",
            "wrong": str(random.integers(2)),
            "answer_risk": f"{random.random():.1f}",
            "cpu_seconds": f"{random.uniform(1, 2) * (1 + 2 * MODELS.index(model)):.2f}",
        }
        for number in range(30)
        for kind in KINDS
        for model in MODELS
    ]
    return Pairs.of(rows)


def test_from_all_passed_on_to_none(pairs: Pairs) -> None:
    result = pairs.cascade(pairs.risky(pairs.every_threshold()))
    small, large = pairs.seconds.mean(axis=1)
    np.testing.assert_allclose(result.passed_on[0, [0, -1]], [1, 0])
    np.testing.assert_allclose(result.cost[0, [0, -1]], [(small + large) / large, small / large])
    for right in (result.right, result.random, result.routed):
        np.testing.assert_allclose(right[0, [0, -1]], pairs.right[::-1].mean(axis=1))
    assert (np.diff(result.passed_on[0]) < 0).all()
    assert (np.diff(result.cost[0]) < 0).all()


def test_each_question_has_the_answer_that_a_gate_would_let_stand(pairs: Pairs) -> None:
    columns = zip(pairs.risks[0], *pairs.right, *pairs.seconds, strict=True)
    answers = [
        (large, first + second) if risk >= 0.6 else (small, first) for risk, small, large, first, second in columns
    ]
    result = pairs.cascade(pairs.risky([0.6]))
    right, seconds = np.mean(answers, axis=0)
    np.testing.assert_allclose(result.right, right)
    np.testing.assert_allclose(result.cost, seconds / pairs.seconds[1].mean())


def test_an_order_that_knows_nothing_is_a_random_cascade(pairs: Pairs) -> None:
    """The mean over all rotations of the risks passes on every question equally often."""
    rotated = [np.roll(pairs.risky([0.6]), step, axis=1) for step in range(len(pairs.kinds))]
    result = pairs.cascade(np.concatenate(rotated))
    np.testing.assert_allclose(result.right.mean(), result.random.mean())


def test_answers_below_a_threshold_are_given(pairs: Pairs) -> None:
    for model, (risks, right) in enumerate(zip(pairs.risks, pairs.right, strict=True)):
        coverage, of_these = pairs.answered([0.0, 0.6, 1.1], model)
        np.testing.assert_allclose(coverage, [0, (risks < 0.6).mean(), 1])
        np.testing.assert_allclose(of_these, [np.nan, right[risks < 0.6].mean(), right.mean()])


def test_draws_are_of_whole_passages(pairs: Pairs) -> None:
    drawn = pairs.draws()
    assert (drawn.sum(axis=1) == len(pairs.kinds)).all()
    for passage in np.unique(pairs.passages):
        of_passage = drawn[:, pairs.passages == passage]
        assert (of_passage == of_passage[:, :1]).all()


def test_the_page_has_the_tables_of_the_results() -> None:
    page = FIGURE.with_suffix(".md").read_text(encoding="utf-8")
    assert [line for line in tables(Pairs.of(read(ANSWERS))) if line not in page] == []


def test_the_figure_is_drawn(pairs: Pairs, tmp_path: Path) -> None:
    figure(pairs).savefig(tmp_path / "cascade.svg")
    assert (tmp_path / "cascade.svg").read_bytes()


def test_asking_goes_on_where_it_stopped(engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = CocoaEngine(tiny_model("llama", vocab_size=len(engine.tokenizer)), engine.tokenizer)
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: tiny)
    questions = [
        RagQuestion(id=f"{number}-answerable", kind="answerable", source="", passage="A.", question="B?", answers=["C"])
        for number in range(2)
    ]
    path = tmp_path / "rag.jsonl"
    path.write_text("".join(question.model_dump_json() + "\n" for question in questions), encoding="utf-8")
    options = argparse.Namespace(
        rag=path, answers=tmp_path / "answers.csv", small="", large="", limit=1, threads=torch.get_num_threads()
    )
    cascade.ask(options)
    first = read(options.answers)
    options.limit = 2
    cascade.ask(options)
    rows = read(options.answers)
    assert rows[:2] == first
    assert [(row["model"], row["id"]) for row in rows] == [(model, item.id) for item in questions for model in MODELS]
    assert Pairs.of(rows).risks.shape == (2, 2)
