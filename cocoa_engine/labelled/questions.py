"""Questions whose answers are known, for a model to answer by itself: an answer's label is then found by comparing.

JSON lines with ``question``, ``answers`` and, if there is one, the ``context`` to answer from:

>>> {"question": "Who wrote Dune?", "context": "Dune is a novel by Frank Herbert.", "answers": ["Frank Herbert"]}

or NQ-Swap (Longpre et al., 2021) as it is published, one parquet file: each question with its own passage and with one
in which the answer was swapped.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError
from cocoa_engine.labelled.files import field, read_json_lines, read_parquet


@dataclass(frozen=True)
class Question:
    """A question, and what would be a right answer to it.

    Attributes:
        text: the question itself.
        context: what to answer from; none asks what the model knows.
        answers: an answer is right if it holds one of these, see :func:`is_right`.
        group: questions that share it are held together: all are fitted on, or none.
    """

    text: str
    context: str | None
    answers: tuple[str, ...]
    group: str

    @property
    def request(self) -> str:
        """What the model is asked."""
        if self.context is None:
            return f"{self.text}\nAnswer in a few words."
        task = "Answer the question from the passage, in a few words."
        return f"Passage: {self.context}\n\n{task}\nQuestion: {self.text}"

    def is_right(self, answer: str) -> bool:
        """Whether an answer holds one of the known ones, word for word: without case, punctuation and articles."""
        words = f" {_normalized(answer)} "
        return any(f" {_normalized(known)} " in words for known in self.answers)


def read_questions(path: str | Path) -> list[Question]:
    """Read a file of questions; those that come twice, with the same context, are read once.

    Raises:
        DataError: it cannot be read, holds nothing, or a question lacks something.
        MissingExtraError: it is a parquet file, and pyarrow is not installed.
    """
    path = Path(path)
    questions: dict[tuple[str, str | None], Question] = {}
    for where, question in _nq_swap(path) if path.suffix == ".parquet" else _own(path):
        if not question.text.strip() or not any(_normalized(answer) for answer in question.answers):
            raise DataError(f"{where}: the question is empty, or has no answer that is a word.")
        questions.setdefault((question.text, question.context), question)
    if not questions:
        raise DataError(f"{path} holds no questions.")
    return list(questions.values())


def _own(path: Path) -> Iterator[tuple[str, Question]]:
    for where, row in read_json_lines(path):
        text = field(row, "question", str, where)
        context = field(row, "context", str, where) if row.get("context") is not None else None
        yield where, Question(text, context, _strings(row, "answers", where), str(row.get("group", text)))


def _nq_swap(path: Path) -> Iterator[tuple[str, Question]]:
    """The first row of each question: others swap in other answers."""
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
        raise DataError(f"{where}: {name} must be a list of texts, with one at least.")
    return tuple(values)


def _normalized(text: str) -> str:
    """As SQuAD's evaluation compares: lower case without punctuation, articles and further white space."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
