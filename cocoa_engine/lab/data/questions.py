"""Questions with known answers. The model answers them, and its answers are labelled by comparison.

A file has either JSON lines with ``question``, ``answers`` and optionally the ``context`` to answer from (or ``ctxs``,
a list of passages with a ``text`` each):

>>> {"question": "Who wrote Dune?", "context": "Dune is a novel by Frank Herbert.", "answers": ["Frank Herbert"]}

A list of passages in ``ctxs`` may stand for ``context``: the ``text`` of the first one is taken. Or the file is NQ-Swap
(Longpre et al., 2021) as published: a parquet file in which each question has its original passage and a passage in
which the answer was swapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError
from cocoa_engine.lab.files import as_object, field, plain_text, read_json_lines, read_parquet
from cocoa_engine.text_matching import normalized


@dataclass(frozen=True)
class Question:
    """A question with its known answers.

    Attributes:
        text: the question itself.
        context: the passage to answer from. `None`: the model answers from its own knowledge.
        answers: an answer is right if it contains one of these, see :meth:`is_right`.
        group: questions with the same group are never divided between fitting and validation.
    """

    text: str
    context: str | None
    answers: tuple[str, ...]
    group: str

    @property
    def request(self) -> str:
        """The text that the model is asked."""
        if self.context is None:
            return f"{self.text}\nAnswer in a few words."
        task = "Answer the question from the passage, in a few words."
        return f"Passage: {self.context}\n\n{task}\nQuestion: {self.text}"

    def is_right(self, answer: str) -> bool:
        """Whether an answer contains a known answer word for word, ignoring case, punctuation and articles."""
        words = f" {normalized(answer)} "
        return any(f" {normalized(known)} " in words for known in self.answers)


def read_questions(path: str | Path) -> list[Question]:
    """Read a file of questions. Repeated questions with the same context are read once.

    Raises:
        DataError: the file cannot be read, has no questions, or a question lacks a field or a usable answer.
        MissingExtraError: the file is parquet, and pyarrow is not installed.
    """
    path = Path(path)
    questions: dict[tuple[str, str | None], Question] = {}
    for where, question in _nq_swap(path) if path.suffix == ".parquet" else _json_lines(path):
        if not question.text.strip() or not any(normalized(answer) for answer in question.answers):
            raise DataError(f"{where}: the question is empty, or none of its answers contains a word.")
        questions.setdefault((question.text, question.context), question)
    if not questions:
        raise DataError(f"{path} has no questions.")
    return list(questions.values())


def _json_lines(path: Path) -> Iterator[tuple[str, Question]]:
    for where, row in read_json_lines(path):
        text = field(row, "question", str, where)
        group = plain_text(row.get("group", text), "group", where)
        yield where, Question(text, _context(row, where), _strings(row, "answers", where), group)


def _context(row: Mapping[str, Any], where: str) -> str | None:
    """The passage: the field ``context``, or the text of the first of ``ctxs``, as NQ with gold passages has it."""
    if row.get("context") is not None:
        return field(row, "context", str, where)
    passages = field(row, "ctxs", list, where) if row.get("ctxs") is not None else []
    return field(as_object(passages[0], f"{where}, ctxs"), "text", str, f"{where}, ctxs") if passages else None


def _nq_swap(path: Path) -> Iterator[tuple[str, Question]]:
    """The first row of each question; the other rows swap in other answers."""
    seen = set()
    for where, row in read_parquet(path):
        text = field(row, "question", str, where)
        if text not in seen:
            seen.add(text)
            for kind in ("org", "sub"):
                context = field(row, f"{kind}_context", str, where)
                yield where, Question(text, context, _strings(row, f"{kind}_answer", where), text)


def _strings(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    values: Sequence[Any] = field(row, name, list, where)
    if not values or not all(isinstance(value, str) for value in values):
        raise DataError(f"{where}: {name} must be a non-empty list of strings.")
    return tuple(values)
