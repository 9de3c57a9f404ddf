"""The tables of the rules for the end of an answer, from the measures of every answer in answers.csv.gz.

python docs/explanation/decoding-default/tables.py
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cocoa_engine.lab.statistics import interval

BASELINE = "greedy"
DRAWS = 10_000
ANSWERS = Path(__file__).with_name("answers.csv.gz")
SETS = {
    "samsum": ("SAMSum", "rouge_l"),
    "xsum": ("XSum", "rouge_l"),
    "nq": ("NQ", "f1"),
    "nq_swap": ("NQ-Swap", "f1"),
    "truthfulqa_gen": ("TruthfulQA", "rouge_l_acc"),
}
"""The heading of each set, and its measure."""
METHODS = {"cocoa": "CoCoA", "cocoa-sig": "CoCoA-SIG"}
RULES = ("sum", "mean", "common_length", "end_mean", "greedy_end", "gnmt", "sqrt")
TEXT = "truthfulqa_gen"
"""The only set whose measure is a share, and whose prompt offers an answer that rejects the question."""

Row = dict[str, str]


def read() -> dict[tuple[str, str], dict[str, Row]]:
    """By set and rule, the row of each prompt."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["task"], _rule(row["arm"])), {})[row["id"]] = row
    return found


def _rule(arm: str) -> str:
    if arm == BASELINE:
        return arm
    method, _, rule = arm.partition(", ")
    return f"{METHODS[method.split()[0]]}, {rule}"


def rows() -> list[str]:
    """The names of the rows: greedy decoding, then each method with each rule."""
    return [BASELINE, *(f"{method}, {rule}" for method in METHODS.values() for rule in RULES)]


def quality() -> Iterator[str]:
    """The first table: the measures and their differences to greedy decoding, rejected and lost answers."""
    found = read()
    headings = [heading for heading, _ in SETS.values()]
    yield f"| rule | {' | '.join(headings)} | TruthfulQA: rejected | lost |"
    yield f"| --- |{' ---: |' * (len(headings) + 2)}"
    for name in rows():
        cells = [_quality(found[task, name], found[task, BASELINE], task) for task in SETS]
        rejected = [int(row["rejected"]) for row in found[TEXT, name].values()]
        lost = sum(
            row["empty"] > found[task, BASELINE][key]["empty"]
            for task in SETS
            for key, row in found[task, name].items()
        )
        yield f"| {name} | {' | '.join(cells)} | {100 * sum(rejected) / len(rejected):.1f} % | {lost} |"


def _quality(own: dict[str, Row], greedy: dict[str, Row], task: str) -> str:
    measure = SETS[task][1]
    scale, digits = (100, 1) if task == TEXT else (1, 3)
    prompts = sorted(own)
    values = [scale * _measured(own[key], measure) for key in prompts]
    if own is greedy:
        return f"{sum(values) / len(values):.{digits}f}"
    return paired_difference(values, [scale * _measured(greedy[key], measure) for key in prompts], digits)


def paired_difference(values: Sequence[float], baseline: Sequence[float], digits: int) -> str:
    """The mean difference of paired values, with its 95 % percentile bootstrap interval over pairs."""
    differences = np.subtract(values, baseline, dtype=np.float64)
    count = len(differences)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    shown = interval(float(differences.mean()), draws @ differences / count).shown(f"+.{digits}f")
    return shown.replace("-", "−")


def _measured(row: Row, measure: str) -> float:
    return float(dict(part.split("=") for part in row["metrics"].split())[measure])


def lengths() -> Iterator[str]:
    """The second table: the mean number of tokens, and the number of empty answers."""
    found = read()
    yield f"| rule | {' | '.join(heading for heading, _ in SETS.values())} |"
    yield f"| --- |{' ---: |' * len(SETS)}"
    for name in rows():
        yield f"| {name} | {' | '.join(_length(list(found[task, name].values())) for task in SETS)} |"


def _length(own: list[Row]) -> str:
    empty = sum(int(row["empty"]) for row in own)
    return f"{sum(int(row['tokens']) for row in own) / len(own):.1f} ({empty})"


if __name__ == "__main__":
    for table in (quality(), lengths()):
        print("\n".join(table), end="\n\n")
