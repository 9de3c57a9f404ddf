"""The questions about passages that do not answer them: how they are made, and the grader on real answers."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.rag_questions import KINDS, Kind, RagQuestion, is_right, license_terms, make, natural_questions
from cocoa_engine.lab.self_made import passages
from cocoa_engine.text_matching import contains

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
