"""What the agreement of sampled answers is worth, and its cost: ``python -m benchmarks.consistency FILE --out ROWS``.

FILE has questions with known answers, as ``cocoa calibrate --questions`` reads them. Rows are appended to the file
ROWS, and questions whose rows are there are not asked again.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np

from cocoa_engine import CocoaEngine
from cocoa_engine.datasets.questions import read_questions
from cocoa_engine.studies.consistency import measure, summarise


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
