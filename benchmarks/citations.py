"""How many citations by the attention on each passage are right.

Each question is asked with its own passage among others, which belong to other questions. The answer of the model is
divided into words. A citation of a word is right if it names the question's own passage. Run
``python -m benchmarks.citations --data nq-open-oracle.jsonl.gz`` (NQ questions with the passage that answers them).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cocoa_engine import CocoaEngine
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.citations import whole_words

SHOWN = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)


def main() -> None:
    """Ask the questions, or read a file of answers, and print the share of right citations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--words", type=int, default=60, help="words of each passage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("citations.jsonl"), help="answers; continued if it exists")
    options = parser.parse_args()
    rows = list(_questions(options.data, options.questions, options.passages, options.words, options.seed))
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    engine = CocoaEngine.from_pretrained(dtype="float32")
    for row in rows[len(done) :]:
        done.append(_answered(engine, **row))
        with options.out.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
    _print(done)


def _questions(path: Path, count: int, passages: int, words: int, seed: int) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    drawn = random.Random(seed)
    for row in drawn.sample(rows, count):
        others = drawn.sample([other for other in rows if other is not row], passages - 1)
        texts = [_cut(one["ctxs"][0]["text"], one["answers"] if one is row else [], words) for one in (row, *others)]
        order = list(range(passages))
        drawn.shuffle(order)
        yield {
            "question": row["question"],
            "answers": row["answers"],
            "passages": [texts[number] for number in order],
            "own": order.index(0),
        }


def _cut(text: str, answers: Sequence[str], words: int) -> str:
    """The first words of a passage; for a question's own passage, the words around the answer."""
    at = min((text.find(answer) for answer in answers if answer in text), default=0)
    before = len(text[:at].split())
    start = max(0, before - words // 2)
    return " ".join(text.split()[start : start + words])


def _prompt(passages: Sequence[str], question: str) -> str:
    listed = "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(passages, 1))
    return f"{listed}\n\nAnswer the question from the passages, in one short sentence.\nQuestion: {question}?"


def _answered(engine: CocoaEngine, question: str, answers: list[str], passages: list[str], own: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": _prompt(passages, question)}]
    answer = engine.chat(messages, source=passages, max_new_tokens=24)
    spans = [
        {
            "text": span.text,
            "tokens": len(span.token_ids),
            "attention": span.passage_attention,
        }
        for span in answer.spans
    ]
    lengths = [len(engine.encode(text, add_special_tokens=False)) for text in passages]
    right = any(known.lower() in answer.text.lower() for known in answers)
    words = whole_words(RiskReport.of(answer).spans)
    row = {"question": question, "answer": answer.text, "right": right, "own": own, "lengths": lengths}
    return {**row, "spans": spans, "words": words}


def _print(rows: Sequence[dict[str, Any]]) -> None:
    console = Console(width=110)
    for name, kept in (("all answers", rows), ("right answers", [row for row in rows if row["right"]])):
        parts = [part for row in kept for part in _parts(row)]
        whole = [_parts(row, together=True)[0] for row in kept if row["spans"]]
        console.print(f"{name}: {len(kept)} answers, {len(parts)} parts of whole words")
        for by, lowest in (("attention", SHOWN), ("per token", (0.0,))):
            hit = sum(_best(one[by]) == one["own"] for one in whole)
            console.print(f"  whole answer by {by}: {hit} of {len(whole)} cite the question's own passage")
            for limit in lowest:
                cited = [one for one in parts if max(one[by]) >= limit]
                hits = sum(_best(one[by]) == one["own"] for one in cited)
                console.print(f"    parts, at least {limit:g}: {len(cited)} cited, {hits} of them right")


def _parts(row: dict[str, Any], *, together: bool = False) -> list[dict[str, Any]]:
    """The values of each part of the answer by each passage: the mean attention over tokens."""
    groups = [list(range(len(row["spans"])))] if together else row["words"]
    parts = []
    for group in groups:
        spans = [row["spans"][number] for number in group]
        tokens = sum(span["tokens"] for span in spans)
        if not any(letter.isalnum() for span in spans for letter in span["text"]):
            continue
        attention = [
            sum(span["attention"][number] * span["tokens"] for span in spans) / tokens
            for number in range(len(row["lengths"]))
        ]
        parts.append(
            {
                "own": row["own"],
                "attention": attention,
                "per token": [mass / length for mass, length in zip(attention, row["lengths"], strict=True)],
            }
        )
    return parts


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


if __name__ == "__main__":
    main()
