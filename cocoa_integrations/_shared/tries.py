"""Attempts to answer a question: which one is good enough, and the history that the answer carries."""

from __future__ import annotations

import math
from typing import Any, Generic, Literal, TypeVar, get_args

from cocoa_engine.errors import ConfigError
from cocoa_integrations._shared.finite import finite, severity
from cocoa_integrations._shared.metadata import RISK_KEY

TRIES_KEY = "cocoa_tries"

Measure = Literal["max_risk", "mean_risk"]
"""The value of a report that is compared with the threshold."""

AnswerT = TypeVar("AnswerT")


class Tries(Generic[AnswerT]):
    """The answers of the attempts so far.

    Args:
        threshold: the value from which a risk is too high.
        measure: the risk to compare.
    """

    def __init__(self, threshold: float, measure: Measure) -> None:
        self._threshold, self._measure = threshold, measure
        self._answers: list[AnswerT] = []
        self._history: list[dict[str, Any]] = []

    def add(self, answer: AnswerT, report: dict[str, Any] | None, /, **entry: Any) -> bool:
        """Add an attempt, and return whether its risk is below the threshold.

        It is not without a report, or if the risk is not a finite number.
        """
        risk = None if report is None else finite(report[self._measure])
        self._answers.append(answer)
        self._history.append({**entry, RISK_KEY: report, "risk": risk, "chosen": False})
        return risk is not None and risk < self._threshold

    def best(self) -> tuple[AnswerT, list[dict[str, Any]]]:
        """The first of the least risky answers, and the history of all attempts."""
        risks = [severity(one["risk"]) for one in self._history]
        number = min(range(len(risks)), key=risks.__getitem__)
        self._history[number]["chosen"] = True
        return self._answers[number], self._history


def require_tries(max_tries: Any, measure: Any) -> None:
    """Check the arguments that all retrying engines share.

    Raises:
        ConfigError: ``max_tries`` is not a whole number above 0, or ``measure`` is unknown.
    """
    if isinstance(max_tries, bool) or not isinstance(max_tries, int) or max_tries < 1:
        raise ConfigError(f"max_tries must be a whole number, at least 1 (got {max_tries!r}).")
    if measure not in get_args(Measure):
        raise ConfigError(f"measure must be 'max_risk' or 'mean_risk' (got {measure!r}).")


def growth_of(given: Any, *, has_second: bool) -> float:
    """The factor by which the number of documents grows with each attempt: 2, or 1 with a second retriever.

    Raises:
        ConfigError: the given factor is not a finite number of at least 1.
    """
    growth = given if given is not None else 1.0 if has_second else 2.0
    is_number = isinstance(growth, (int, float)) and not isinstance(growth, bool)
    if not is_number or not math.isfinite(growth) or growth < 1:
        raise ConfigError(f"top_k_growth must be a finite number, at least 1 (got {given!r}).")
    return float(growth)
