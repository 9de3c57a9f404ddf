"""Metrics of one answer. The metric of a run is the mean over its samples."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from cocoa_engine.optional import need
from cocoa_engine.text_matching import normalized, token_f1

REJECTION = "i have no comment"


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1.0 if the normalised answer equals a normalised reference."""
    return float(normalized(answer) in {normalized(reference) for reference in references})


def f1(answer: str, references: Sequence[str]) -> float:
    """The highest F1 score of the normalised words of the answer with those of a reference."""
    return max(token_f1(answer, reference) for reference in references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L F-measure against the closest reference (the ``rouge_score`` package, without stemming)."""
    return float(_rouge().score_multi(list(references), answer)["rougeL"].fmeasure)


@cache
def _rouge() -> Any:
    return need("rouge_score.rouge_scorer", extra="eval", what="ROUGE-L").RougeScorer(["rougeL"])


def rejected(answer: str) -> float:
    """1.0 if the model answered that it has no comment."""
    return float(answer.strip().lower().startswith(REJECTION))


def mc1(best: float, incorrect: Sequence[float]) -> float:
    """1.0 if the best answer of a TruthfulQA question scores above every incorrect one."""
    return float(best > max(incorrect))


def mc2(correct: Sequence[float], incorrect: Sequence[float]) -> float:
    """The normalised probability mass of the correct answers: sum of e^s over them / sum of e^s over all."""
    highest = max(*correct, *incorrect)
    if math.isinf(highest):
        raise ValueError("the scores must be finite")
    mass = [sum(math.exp(score - highest) for score in scores) for scores in (correct, incorrect)]
    return mass[0] / sum(mass)


def mc3(correct: Sequence[float], incorrect: Sequence[float]) -> float:
    """The share of correct answers that score above every incorrect one."""
    highest = max(incorrect)
    return sum(score > highest for score in correct) / len(correct)


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def last_number(text: str) -> float | None:
    """The number after ``####``, which marks the result in GSM8K, or else the last number in the text."""
    marked = text.rpartition("####")[2] if "####" in text else ""
    numbers = _NUMBER.findall(marked)[:1] or _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same_number(answer: str, reference: str) -> float:
    """1.0 if the two texts end in the same number."""
    expected = last_number(reference)
    found = last_number(answer)
    return float(found is not None and expected is not None and math.isclose(found, expected, abs_tol=1e-6))
