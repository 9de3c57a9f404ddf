"""Questions for the evaluation tests, and what writes data files."""

import csv
import json
from pathlib import Path
from typing import Any

from cocoa_engine import CocoaConfig
from cocoa_integrations.evaluation import Arm

TRUTHFULQA_COLUMNS = (
    "Type", "Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers", "Source"
)  # fmt: skip
TRUTHFULQA: list[tuple[str, str, str, str]] = [
    (
        "What is the capital of France?",
        "The capital of France is Paris",
        "The capital of France is Paris; Paris; ",
        "The capital of France is Rome; Rome is the capital of France.",
    ),
    (
        "Can pigs fly?",
        "No, pigs cannot fly",
        "No, pigs cannot fly; Pigs have no wings; No",
        "Yes, pigs can fly; Pigs fly at night",
    ),
    (
        "Is the Earth flat?",
        "No, the Earth is round",
        "No, the Earth is round; The Earth is a sphere",
        "Yes, the Earth is flat; The Earth is a disc",
    ),
]


def write_truthfulqa(path: Path, rows: list[tuple[str, str, str, str]] = TRUTHFULQA) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TRUTHFULQA_COLUMNS)
        writer.writerows(["Adversarial", "Ours", *row, "https://example.org"] for row in rows)
    return path


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows_of(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    """The lines of a file in the folder of a run."""
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


RUN_ARMS = [Arm("greedy"), Arm("cocoa-sig", "f_mlds", 2.5)]


def run_settings(task: str) -> dict[str, Any]:
    """The settings of a made-up run."""
    decoding = CocoaConfig().model_dump(mode="json", exclude={"method", "metric", "alpha"})
    return {"task": task, "model": {"name": "tiny"}, "decoding": decoding, "data": {"file": "a.csv"}}


def run_rows(answers: dict[tuple[str, str], str], texts: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of a made-up run: the answers by arm and id, each about a text."""
    arms = {str(arm): arm._asdict() for arm in RUN_ARMS}
    both = {"references": ["A reference."], "incorrect": ["A mistake."]}
    both |= {"metrics": {"rejected": 0.0, "rouge_l_acc": 1.0, "rouge_l": 0.5}}
    return [
        {"arm": arm, "id": key, "sample": key, **arms[arm], "question": texts[key], "context": texts[key], **both}
        | {"answer": answer}
        for (arm, key), answer in answers.items()
    ]
