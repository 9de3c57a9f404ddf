"""Metrics of one answer, and the statistics of a metric over the samples of a run."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from cocoa_engine.integration import need
from cocoa_engine.lab.statistics import FEW_GROUPS, Interval, interval
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
    number, expected = last_number(answer), last_number(reference)
    return float(number is not None and expected is not None and math.isclose(number, expected, abs_tol=1e-6))


DRAWS = 2000
_AT_ONCE = 100  # draws in memory at once


def statistics(values: Mapping[str, float], first: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The ``mean`` and the ``standard_error`` (``None`` for a single sample) of a metric, given by sample.

    With the values of the ``first`` method, also the ``difference`` over the samples that both methods have.
    """
    everything = np.array(list(values.values()), dtype=np.float64)
    result: dict[str, Any] = {
        "mean": math.fsum(values.values()) / len(values),
        "standard_error": float(everything.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None,
    }
    if first is not None and (common := [key for key in values if key in first]):
        # the mean paired difference with its bootstrap interval, which is `None` for a single sample
        differences, count = np.array([values[key] - first[key] for key in common]), len(common)
        bounds = Interval(float(differences.mean()), None, None)
        if count > 1:
            random, shares = np.random.default_rng(0), np.full(count, 1 / count)
            draws = [random.multinomial(count, shares, size=_AT_ONCE) for _ in range(DRAWS // _AT_ONCE)]
            bounds = interval(bounds.estimate, np.concatenate([drawn @ differences / count for drawn in draws]))
        result["difference"] = {**bounds._asdict(), "samples": count}
    return result


def beyond_noise(difference: Mapping[str, Any]) -> bool:
    """Whether the 95 % interval of a difference excludes 0, over at least ten samples."""
    low, high = difference["low"], difference["high"]
    return difference["samples"] >= FEW_GROUPS and low is not None and high is not None and (low > 0 or high < 0)
