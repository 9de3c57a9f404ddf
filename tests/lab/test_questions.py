"""Questions with known answers: read as they are, and answers compared word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data import Question, read_questions, sample

ROWS = [
    {"question": "Who wrote Dune?", "context": "Dune is a novel by Frank Herbert.", "answers": ["Frank Herbert"]},
    {"question": "What is 2 + 2?", "answers": ["4", "four"], "group": "sums"},
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_json_lines(tmp_path: Path) -> None:
    dune, total = read_questions(write(tmp_path / "q.jsonl", [*ROWS, ROWS[0]]))
    assert (dune.group, total.group) == ("Who wrote Dune?", "sums")
    assert dune.request.startswith("Passage: Dune is a novel")
    assert dune.request.endswith("Question: Who wrote Dune?")
    assert "Passage" not in total.request
    assert sample([dune, total], 1) in ([dune], [total])


def test_the_gold_passage_of_nq_is_the_context(tmp_path: Path) -> None:
    passages = [{"title": "Dune", "text": "By Frank Herbert."}, {"text": "By Bo Ek."}]
    rows = [{"question": "who wrote dune", "answers": ["Frank Herbert"], "ctxs": passages}]
    (one,) = read_questions(write(tmp_path / "q.jsonl", rows))
    assert one.context == "By Frank Herbert."
    (none,) = read_questions(write(tmp_path / "q.jsonl", [{**rows[0], "ctxs": []}]))
    assert none.context is None
    with pytest.raises(DataError, match=r"ctxs\.0\.text: Field"):
        read_questions(write(tmp_path / "q.jsonl", [{**rows[0], "ctxs": [{}]}]))


def test_nq_swap_as_published(tmp_path: Path) -> None:
    """Each question with its own passage, and once with a swapped answer."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {"question": "who wrote dune", "org_context": "By Frank Herbert.", "org_answer": ["Frank Herbert"]}
    rows = [{**row, "sub_context": f"By {name}.", "sub_answer": [name]} for name in ("Ann Lee", "Bo Ek")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dev.parquet")
    own, swapped = read_questions(tmp_path / "dev.parquet")
    assert (own.context, own.answers) == ("By Frank Herbert.", ("Frank Herbert",))
    assert (swapped.context, swapped.answers) == ("By Ann Lee.", ("Ann Lee",))
    assert own.group == swapped.group


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It was Frank Herbert.", True),
        ("frank  HERBERT", True),
        ("Frank Herberts", False),
        ("Herbert", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_holds_a_known_one(answer: str, right: bool) -> None:
    assert Question("Who wrote Dune?", None, ("Frank Herbert", "F. H."), "").is_right(answer) is right


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who?"}, "answers: Field required"),
        ({"question": "Who?", "answers": []}, "answers: .* at least 1"),
        ({"question": "Who?", "answers": [1]}, "answers.0: .* valid string"),
        ({"question": "Who?", "answers": ["the"]}, "none of its answers contains a word"),
        ({"question": " ", "answers": ["a b"]}, "the question is empty"),
        ({"question": "Who?", "answers": ["x"], "context": 3}, "context: .* valid string"),
    ],
)
def test_what_is_no_question(row: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(write(tmp_path / "q.jsonl", [row]))


def test_no_questions(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no questions"):
        read_questions(write(tmp_path / "q.jsonl", []))
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_questions(write(tmp_path / "q.parquet", ROWS))
