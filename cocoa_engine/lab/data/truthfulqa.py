"""TruthfulQA (Lin et al., 2022): questions with true and false answers, one CSV file."""

from __future__ import annotations

from pathlib import Path

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data.records import LabelledText
from cocoa_engine.lab.files import read_csv

FILE = "TruthfulQA.csv"
COLUMNS = ("Question", "Best Answer", "Correct Answers", "Incorrect Answers")


def matches(path: Path) -> bool:
    """A folder with ``TruthfulQA.csv``, or any CSV file."""
    return (path / FILE).exists() if path.is_dir() else path.suffix == ".csv"


def read(path: Path) -> list[LabelledText]:
    """Read every answer of a CSV file, or of a folder's ``TruthfulQA.csv``, as a record.

    The best answer to a question comes first, then the other true answers, then the false ones. An answer that is
    listed as both true and false becomes two records (the published file does so with "Unknown" for two questions).

    Raises:
        DataError: a column is missing, or a question or its answers are empty.
    """
    records = []
    file = path / FILE if path.is_dir() else path
    for number, (where, row) in enumerate(read_csv(file, COLUMNS)):
        if empty := [name for name in COLUMNS if not row[name].strip(" ;")]:
            raise DataError(f"{where}: the column {empty[0]!r} is empty.")
        question, best = row["Question"].strip(), row["Best Answer"].strip()
        true = list(dict.fromkeys([best, *_answers(row["Correct Answers"])]))
        false = list(dict.fromkeys(_answers(row["Incorrect Answers"])))
        for label, answers in ((False, true), (True, false)):
            for index, answer in enumerate(answers):
                records.append(
                    LabelledText(
                        id=f"{number}-{'false' if label else 'true'}-{index}",
                        prompt=f"Question: {question}\nAnswer:",
                        text=answer,
                        question=question,
                        label=label,
                        spans=None,
                        group=str(number),
                    )
                )
    return records


def _answers(cell: str) -> list[str]:
    return [answer.strip() for answer in cell.split(";") if answer.strip()]
