"""Cascades of two models: what thresholds cost and give, and the page that shows it.

The scores of own answers, and the fit that leaves a model out. The questions about passages that do not answer them:
how they are made, and the grader on real answers.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import cascade, own_answers
from benchmarks.cascade import ANSWERS, FIGURE, MODELS, Pairs, figure, tables
from benchmarks.own_answers import NOT_FITTED, Answers, Asked, gate, read, row_of, scores, table, write
from benchmarks.rag_questions import KINDS, Kind, RagQuestion, is_right, license_terms, make, natural_questions
from cocoa_engine import CocoaEngine
from cocoa_engine.lab.self_made import passages
from cocoa_engine.text_matching import contains
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer


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


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers.of(read(own_answers.ANSWERS))


def test_the_labels_of_a_model_do_not_reach_its_own_risks(answers: Answers) -> None:
    risks = answers.left_out()
    assert np.isfinite(risks).all()
    own = answers.models == answers.models[0]
    for changed in (own, answers.sets == NOT_FITTED):
        again = answers._replace(wrong=answers.wrong ^ changed).left_out()
        np.testing.assert_allclose(again[changed], risks[changed])
    assert not np.allclose(answers._replace(wrong=answers.wrong ^ own).left_out()[~own], risks[~own], atol=0.02)


@pytest.mark.parametrize("made", [table, gate])
def test_a_row_for_each_model_and_set(answers: Answers, made: Callable[[Answers], Iterator[str]]) -> None:
    """Also of a model for which `cocoa heads` was not run."""
    head, _, *rows = made(answers._replace(models=np.char.replace(answers.models, "Gemma", "Another")))
    assert len(rows) == len({*zip(answers.models.tolist(), answers.sets.tolist(), strict=True)})
    assert {row.count("|") for row in rows} == {head.count("|")}


def test_answers_are_read_back(tmp_path: Path) -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    answer = engine.generate("w1 w2 w3", max_new_tokens=12)
    rows = [row_of("tiny", "short", Asked(str(number), "0", [], lambda text: False), answer) for number in range(3)]
    write(tmp_path / "answers.csv", rows[:2])
    write(tmp_path / "answers.csv", rows[2:])
    back = Answers.of(read(tmp_path / "answers.csv"))
    assert back.wrong.tolist() == [True] * 3
    for name, value in scores(answer).items():
        np.testing.assert_allclose(back.scores[name], value, rtol=1e-3)


LICENSE = (
    '"Work" means the text and the pictures that its authors have published under these terms. '
    'A "Derived Work" means whatever contains the text or a part of it, in any language and form. '
    'The "Distributor" is whoever gives copies to others, for a fee or without one, and says so. '
    '"Cover Page" means the page before the text that names its authors, its year and its publisher.'
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Facts of invented passages as rows of NQ, and licenses."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [
        {
            "question": fact.question.rstrip("?").replace("In which year", "when").lower(),
            "answers": list(fact.answers),
            "ctxs": [{"title": passage.text.split(" ", 3)[1], "text": passage.text}],
        }
        for passage in islice(passages(3), 120)
        for fact in passage.stated
    ]
    file = folder / "nq.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in ("Apache-2.0", "Artistic", "GFDL-1.3", "GPL-3", "LGPL-2.1", "LGPL-3", "MPL-1.1", "MPL-2.0"):
        (folder / name).write_text(LICENSE, encoding="utf-8")
    return file, folder


def made(files: tuple[Path, Path], seed: int) -> list[RagQuestion]:
    file, folder = files
    return make([*natural_questions(file), *license_terms(folder, seed)], seed)


def test_each_passage_has_a_question_of_each_kind(files: tuple[Path, Path]) -> None:
    items = made(files, 0)
    assert len(items) > 60
    assert items == made(files, 0) != made(files, 1)
    assert len({item.id for item in items}) == len(items)
    for start in range(0, len(items), len(KINDS)):
        answerable, unanswerable, false_premise = group = items[start : start + len(KINDS)]
        passage = answerable.passage
        assert [item.kind for item in group] == list(KINDS)
        assert {item.passage for item in group} == {passage}
        assert contains(passage, answerable.answers)
        assert not any(contains(item.question, answerable.answers) for item in group)
        assert false_premise.answers == answerable.answers
        assert false_premise.premise
        assert contains(false_premise.question, [false_premise.premise])
        assert not contains(passage, [false_premise.premise])
        assert not unanswerable.answers
        assert unanswerable.question != answerable.question


def test_no_passage_has_an_answer_of_the_question_of_another(files: tuple[Path, Path]) -> None:
    file, folder = files
    facts = {fact.source: fact for fact in (*natural_questions(file), *license_terms(folder, 0))}
    borrowed = [item for item in made(files, 0) if item.kind == "unanswerable"]
    for item in borrowed:
        fact = facts[item.source.split(", ")[1]]
        assert item.question == fact.question
        assert not contains(item.passage, fact.answers)
    assert max(Counter(item.question for item in borrowed if "license" not in item.question).values()) == 1


def item(kind: Kind, answers: list[str], premise: str | None = None) -> RagQuestion:
    return RagQuestion(id="0", kind=kind, source="", passage="", question="", answers=answers, premise=premise)


@pytest.mark.parametrize(
    ("kind", "answers", "premise", "answer", "right"),
    [  # what models of 135M to 1.5B parameters answered
        ("answerable", ["1998"], None, "Craig Brown guided Scotland to the 1998 FIFA World Cup.", True),
        ("answerable", ["April 11, 2018"], None, "The nba season ends on April 14, 2018.", False),
        ("answerable", ["Brown"], None, "The context does not say when Brown played.", False),
        ("unanswerable", [], None, "The context does not say.", True),
        ("unanswerable", [], None, "The United States won its independence from Great Britain.", False),
        ("false_premise", ["20"], "16", "There are 16 episodes in season 7 of Pretty Little Liars.", False),
        ("false_premise", ["20"], "16", "The context does not say.", True),
        ("false_premise", ["1998"], "2003", "Scotland did not qualify for the 2003 FIFA World Cup in 2003.", True),
        ("false_premise", ["Gwendoline Christie"], "Domhnall Gleeson", "She is played by Gwendoline Christie.", True),
        ("false_premise", ["October 6, 2017"], "May 31, 2012", "It came out on May 31, 2012 because it was released on "
            "October 6, 2017 in the United States.", False),
        ("false_premise", ["Hon July Moyo"], "Jyotirindra Basu", "The context does not provide the answer to the "
            "question of why Jyotirindra Basu is the minister of local government in Zimbabwe.", True),
        ("false_premise", ["The Program"], "The Library", 'The license uses the term "The Library" because it refers '
            "to the entire software package, not just a single piece of code.", False),
        ("false_premise", ["1998"], "2003", "Scotland last qualified for the World Cup in 1998.", True),
        ("false_premise", ["2013"], "2010", "Because they moved to the division in 2013.", False),
        ("false_premise", ["MercyMe"], "Paul Williams", "It was inspired by the death of Millard's father.", False),
    ],
)  # fmt: skip
def test_right_answers(kind: Kind, answers: list[str], premise: str | None, answer: str, right: bool) -> None:
    assert is_right(answer, item(kind, answers, premise)) is right
