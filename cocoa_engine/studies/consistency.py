"""How well the agreement of sampled answers tells wrong answers from right ones, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cocoa_engine.datasets.questions import Question
from cocoa_engine.engine import CocoaEngine
from cocoa_engine.studies.fitting.measured import question_prompts
from cocoa_engine.studies.signal.ranking import Bootstrap, Interval, Ranked

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
    for question, prompt in zip(questions, question_prompts(engine, questions), strict=True):
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
