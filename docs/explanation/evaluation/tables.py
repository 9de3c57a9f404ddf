"""The tables of the evaluation page, from the measures of every answer in this folder.

python docs/explanation/evaluation/tables.py
python docs/explanation/evaluation/tables.py collect MODEL RUN...    # adds the answers of `cocoa eval --out RUN`
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from cocoa_engine.lab.statistics import interval

FOLDER = Path(__file__).parent
BASELINE = "greedy"
DRAWS = 10_000
COLUMNS = {
    "NQ, F1": ("nq", "f1", 3),
    "NQ-Swap, F1": ("nq_swap", "f1", 3),
    "SAMSum, ROUGE-L": ("samsum", "rouge_l", 3),
    "XSum, ROUGE-L": ("xsum", "rouge_l", 3),
    "TruthfulQA, closer to true, %": ("truthfulqa_gen", "rouge_l_acc", 1),
    "TruthfulQA, rejected, %": ("truthfulqa_gen", "rejected", 1),
    "TruthfulQA, MC1, %": ("truthfulqa_mc", "mc1", 1),
    "GSM8K, %": ("gsm8k", "accuracy", 1),
    "MBPP, %": ("mbpp", "pass_at_1", 1),
}
"""The task, the measure and the digits of each column. With one digit the measure is a share, in percent."""
OF_RULES = list(COLUMNS)[:6]
METHODS = {"greedy": "greedy", "dola": "DoLa", "cocoa": "CoCoA", "cocoa-sig": "CoCoA-SIG"}
RULES = ("sum", "mean", "greedy_end")

Rows = dict[tuple[str, str], dict[str, dict[str, str]]]
"""The rows of answers, by task and arm, then by the id of the question."""


def models() -> Iterator[str]:
    """For each model the measure of greedy decoding, and the differences of the other methods to it."""
    found: dict[str, Rows] = {}
    with (FOLDER / "answers.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["model"], {}).setdefault((row["task"], row["method"]), {})[row["id"]] = row
    yield f"| model | method | {' | '.join(COLUMNS)} |"
    yield "| --- | --- |" + " ---: |" * len(COLUMNS)
    for model, rows in found.items():
        for method, name in METHODS.items():
            yield f"| {model} | {name} | {' | '.join(_cell(rows, method, column) for column in COLUMNS)} |"


def rules() -> Iterator[str]:
    """Rules for the end of an answer: differences to greedy decoding, and lost answers."""
    rows: Rows = {}
    with gzip.open(FOLDER / "rules.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            method, _, rule = row["arm"].partition(", ")
            name = f"{METHODS[method.split()[0]]}, {rule}" if rule else BASELINE
            rows.setdefault((row["task"], name), {})[row["id"]] = row
    yield f"| rule | {' | '.join(OF_RULES)} | lost |"
    yield "| --- |" + " ---: |" * (len(OF_RULES) + 1)
    for name in (BASELINE, *(f"{METHODS[method]}, {rule}" for method in ("cocoa", "cocoa-sig") for rule in RULES)):
        tasks = {COLUMNS[column][0] for column in OF_RULES}
        own, greedy = (
            {(task, key): row for task in tasks for key, row in rows[task, arm].items()} for arm in (name, BASELINE)
        )
        lost = sum(row["empty"] > greedy[key]["empty"] for key, row in own.items())
        yield f"| {name} | {' | '.join(_cell(rows, name, column) for column in OF_RULES)} | {lost} |"


def latency() -> Iterator[str]:
    """The time per token of greedy decoding, and its ratios: medians over the rounds of `cocoa bench --json`."""
    yield f"| model | greedy, ms per token | {' | '.join(f'{name} / greedy' for name in list(METHODS.values())[1:])} |"
    yield "| --- |" + " ---: |" * len(METHODS)
    for line in (FOLDER / "latency.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        times = {name: np.array(run["decoders"][name]["seconds_per_token"]) for name in METHODS}
        baseline = times.pop(BASELINE)
        ratios = " | ".join(f"{np.median(of_method / baseline):.2f}" for of_method in times.values())
        yield f"| {run['model']} | {np.median(baseline) * 1e3:.1f} | {ratios} |"


def _cell(rows: Rows, arm: str, column: str) -> str:
    """The baseline's mean and number of answers; the difference of another arm, bold if its interval excludes 0."""
    task, measure, digits = COLUMNS[column]
    own, greedy = rows.get((task, arm), {}), rows.get((task, BASELINE), {})
    ids = sorted(own.keys() & greedy.keys())
    if not ids:
        return ""
    values, baseline = (
        [
            (100 if digits == 1 else 1) * float(dict(part.split("=") for part in row["metrics"].split())[measure])
            for row in of_arm
        ]
        for of_arm in ([own[key] for key in ids], [greedy[key] for key in ids])
    )
    if arm == BASELINE:
        return f"{np.mean(values):.{digits}f} of {len(ids)}"
    return paired_difference(values, baseline, digits)


def paired_difference(values: Sequence[float], baseline: Sequence[float], digits: int) -> str:
    """The mean difference of paired values, with its 95 % percentile bootstrap interval over pairs."""
    differences = np.subtract(values, baseline, dtype=np.float64)
    estimate = interval(float(differences.mean()), _draws(len(differences)) @ differences / len(differences))
    shown = estimate.shown(f"+.{digits}f").replace("-", "−")
    return f"**{shown}**" if estimate.low is not None and estimate.low * estimate.high > 0 else shown  # type: ignore[operator]


@cache
def _draws(count: int) -> np.ndarray:
    """How often each of ``count`` pairs is in each draw."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=DRAWS)


def collect(model: str, runs: Sequence[str]) -> None:
    """Add the answers of runs of `cocoa eval` that are not in the table yet."""
    path = FOLDER / "answers.csv"
    rows: dict[tuple[str, ...], str] = {}
    if path.exists():
        with path.open(encoding="utf-8") as file:
            rows = {tuple(key): value for *key, value in list(csv.reader(file))[1:]}
    for run in map(Path, runs):
        task = json.loads((run / "results.json").read_text(encoding="utf-8"))["settings"]["task"]
        for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            rows[model, task, sample["method"], sample["id"]] = " ".join(
                f"{name}={value:.4g}" for name, value in sample["metrics"].items()
            )
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "task", "method", "id", "metrics"])
        writer.writerows((*key, value) for key, value in rows.items())


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        collect(sys.argv[2], sys.argv[3:])
    else:
        for table in (models(), latency(), rules()):
            print("\n".join(table), end="\n\n")
