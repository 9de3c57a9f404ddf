"""What the agreement of sampled answers is worth, and its cost: ``python -m benchmarks.consistency FILE --out ROWS``.

FILE has questions with known answers, as ``cocoa calibrate --questions`` reads them. Rows are appended to the file
ROWS, and questions whose rows are there are not asked again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cocoa_engine import CocoaEngine
from cocoa_engine.lab.data import Question, read_questions
from cocoa_engine.lab.measured import request_prompt
from cocoa_engine.lab.statistics import Bootstrap, Interval, Ranked

SCORES = ("agreement", "f1", "mean_log_prob", "min_log_prob")
"""Scores of an answer that are low where it is likely wrong."""


def measure(
    engine: CocoaEngine,
    questions: Sequence[Question],
    *,
    n: int = 5,
    temperature: float = 0.8,
    max_new_tokens: int = 24,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Answer each question greedily, sample ``n`` answers, and yield one row per question.

    A row has ``question``, ``group``, ``answer``, ``wrong`` (the answer contains no known answer), the scores of
    :data:`SCORES` and the seconds that the answer (``answer_seconds``) and the samples (``sample_seconds``) took.
    """
    for question in questions:
        prompt = request_prompt(engine, question.request)
        started = time.perf_counter()
        answer = engine.generate(prompt, method="greedy", max_new_tokens=max_new_tokens)
        answered = time.perf_counter()
        found = engine.consistency(prompt, answer, n, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        log_probs = [value for span in answer.spans for value in span.token_log_probs]
        yield {
            "question": question.text,
            "group": question.group,
            "answer": answer.text,
            "samples": [sample.text for sample in found.samples],
            "wrong": not question.is_right(answer.text),
            "agreement": found.agreement,
            "f1": found.f1,
            "mean_log_prob": sum(log_probs) / len(log_probs),
            "min_log_prob": min(log_probs),
            "answer_seconds": answered - started,
            "sample_seconds": time.perf_counter() - answered,
        }


def summarise(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """The AUROC of wrong answers of each negated score, and its difference to the mean log-probability.

    Intervals are 95 % bootstrap intervals over questions.
    """
    rows = list(rows)
    wrong = [bool(row["wrong"]) for row in rows]
    bootstrap = Bootstrap([row["group"] for row in rows])
    right = [not each for each in wrong]
    ranked = {name: Ranked([-row[name] for row in rows], wrong, right) for name in SCORES}
    values = {name: bootstrap.interval(each, "auroc") for name, each in ranked.items()}
    base = ranked["mean_log_prob"]
    differences = {name: bootstrap.difference(each, base, "auroc") for name, each in ranked.items() if each is not base}
    return values, differences


def main() -> None:
    """Measure the questions that are left, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, JSON lines")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions, and of the samples")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.8)
    given = parser.parse_args()
    questions = random.Random(given.seed).sample(read_questions(given.file), given.questions)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    left = questions[len(rows) :]
    if left:
        engine = CocoaEngine.from_pretrained(given.model)
        with given.out.open("a") as file:
            for row in measure(engine, left, n=given.samples, temperature=given.temperature, seed=given.seed):
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)
    values, differences = summarise(rows)
    print(f"{len(rows)} answers, {sum(row['wrong'] for row in rows)} wrong\n")
    print("| score | AUROC of wrong answers | difference to mean log p |\n| --- | --- | --- |")
    for name, interval in values.items():
        print(f"| {name} | {interval.shown()} | {differences[name].shown('+.3f') if name in differences else ''} |")
    low, middle, high = np.quantile([row["sample_seconds"] / row["answer_seconds"] for row in rows], [0.1, 0.5, 0.9])
    print(f"\nSeconds of the samples for one of the answer: median {middle:.1f}, 10 % to 90 % {low:.1f} to {high:.1f}.")


if __name__ == "__main__":
    main()
