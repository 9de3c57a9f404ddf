"""Attempts to answer a question: which one is good enough, and the history that the answer carries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

from pydantic import Field

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_engine.report import ReportEntry, RiskReport
from cocoa_integrations._shared.finite import finite, severity
from cocoa_integrations._shared.limits import ABSTENTION, MARK, Limit, Mark, kind_of, reaches, require_reaction
from cocoa_integrations._shared.metadata import RISK_KEY

TRIES_KEY = "cocoa_tries"

Measure = Literal["max_risk", "mean_risk", "answer_risk"]
"""The value of a report that is compared with the threshold."""

OnRisk = Literal["keep", "raise", "mark", "abstain"]
"""What happens to the answer if every attempt is too risky: it is returned as it is; the error is raised; its risky
spans are marked; or another text replaces it."""

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, kw_only=True)
class IfRisky:
    """What happens to the answer if every attempt is too risky. The fields are options of the retries.

    Raises:
        ConfigError: an option is invalid.
    """

    on_risk: OnRisk = "keep"
    mark: Mark = MARK
    answer: str = ABSTENTION

    def __post_init__(self) -> None:
        require_reaction(self.on_risk, OnRisk, self.mark, self.answer)


class Try(ReportEntry):
    """One entry of ``cocoa_tries`` of ``RiskRetryQueryEngine`` (metadata) and ``with_risk_retry``: one for each try."""

    settings: dict[str, Any] = Field(description="The settings that this try changed.")
    alpha: float = Field(description="The setting `alpha` of this try.")
    top_k: int | None = Field(
        description="Number of nodes or documents requested from the retriever; `None` if the retriever has no "
        "such option.",
    )
    source_nodes: int = Field(0, description="LlamaIndex: number of nodes that were retrieved.")
    documents: int = Field(0, description="LangChain: number of documents that were retrieved.")
    answer: str = Field(description="Text of the answer.")
    cocoa_risk: RiskReport | None = Field(
        description="Report of the answer; `None` where nothing was retrieved to answer from.",
    )
    risk: float | None = Field(description="The value that is compared with the threshold; `None` without a report.")
    chosen: bool = Field(description="Whether this answer was returned.")


class Tries(Generic[AnswerT]):
    """The answers of the attempts so far.

    Args:
        limit: the value from which a risk is too high.
        measure: the risk to compare; `None`: that of the answer where the report has one, and otherwise the highest of
            the spans.
    """

    def __init__(self, limit: Limit, measure: Measure | None) -> None:
        self._limit, self._measure = limit, measure
        self._answers: list[AnswerT] = []
        self._history: list[dict[str, Any]] = []
        self._passed: int | None = None

    def add(self, answer: AnswerT, report: dict[str, Any] | None, /, **entry: Any) -> bool:
        """Add an attempt, and return whether its risk is below the threshold.

        It is not without a report, if the risk is not a finite number, or if a gate has withheld the answer. A
        threshold that was given applies to every answer, whatever the ``risk_source`` of its report is; without one
        each answer has its own.
        """
        risk = None if report is None else finite(self._risk(report))
        self._answers.append(answer)
        self._history.append({**entry, RISK_KEY: report, "risk": risk, "chosen": False})
        passed = report is not None and risk is not None and not reaches(risk, self._limit.threshold_for(report))
        passed = passed and _withheld(report) is None
        if passed and self._passed is None:
            self._passed = len(self._answers) - 1
        return passed

    def gate(self, on_risk: OnRisk) -> dict[str, Any] | None:
        """What is done to the returned answer, as the ``gate`` of its report; ``None`` if it is returned as it is.

        Call it after :meth:`best`.

        Raises:
            HallucinationRiskError: every attempt is too risky, and ``on_risk`` is ``raise``, or a gate raised it for
                the returned answer, and ``on_risk`` is not ``abstain``.
        """
        if self._passed is not None:
            return None
        chosen = next(entry for entry in self._history if entry["chosen"])
        report, value = chosen[RISK_KEY], chosen["risk"]
        metric = None if report is None else self._measure_of(report)
        threshold = None if report is None else finite(self._limit.threshold_for(report))
        by_gate = _withheld(report)
        if by_gate is not None:
            metric, threshold, value = (by_gate[name] for name in ("metric", "threshold", "value"))
            if by_gate["action"] == "raise" and on_risk != "abstain":
                on_risk = "raise"
        if on_risk == "keep" or (on_risk == "mark" and by_gate is not None):
            return None
        if on_risk == "raise":
            tried = f"the least risky of {len(self._history)} answers" if len(self._history) > 1 else "the answer"
            what = "has no report" if report is None else f"has a {metric} of {severity(value):.4g}"
            reached = "" if threshold is None else f", which reaches the threshold of {threshold:.4g}"
            raise HallucinationRiskError(
                f"{tried} {what}{reached}",
                report=report,
                value=severity(value),
                threshold=threshold,
                metric=metric,
            )
        return {"action": on_risk, "metric": metric, "threshold": threshold, "value": value}

    @property
    def limit_of_spans(self) -> Limit:
        """The threshold of the spans that are marked: that of the tries where these compare spans, else the spans'."""
        return Limit(self._limit.threshold if self._measure in (None, "max_risk") else None, "risk")

    def _risk(self, report: dict[str, Any]) -> float:
        measure = self._measure_of(report)
        return self._limit.value(report) if measure == "answer_risk" else severity(report[measure])

    def _measure_of(self, report: dict[str, Any]) -> Measure:
        if self._measure is not None:
            return self._measure
        return "answer_risk" if self._limit.metric_for(report) == "answer_risk" else "max_risk"

    def _kind_of(self, entry: dict[str, Any]) -> tuple[str, str | None] | None:
        """What the risk of an attempt is; `None` if it has none."""
        report = entry[RISK_KEY]
        return None if entry["risk"] is None else kind_of(self._measure_of(report), report)

    def best(self) -> tuple[AnswerT, list[dict[str, Any]]]:
        """The first answer below the threshold, or else the first of the least risky, and the history of all attempts.

        Only risks of one kind are compared: the kind of the first attempt whose risk is a finite number. The risk of
        an answer and that of a span are different probabilities, and risks with different ``risk_source`` are on
        different scales. Without any finite risk it is the first answer.
        """
        kinds = [self._kind_of(one) for one in self._history]
        first = next((kind for kind in kinds if kind is not None), None)
        risks = [
            severity(one["risk"] if kind == first else None) for one, kind in zip(self._history, kinds, strict=True)
        ]
        number = min(range(len(risks)), key=risks.__getitem__) if self._passed is None else self._passed
        self._history[number]["chosen"] = True
        return self._answers[number], self._history


def _withheld(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The entry of the gate that withheld an answer; `None` if none did."""
    gate = (report or {}).get("gate")
    return gate if gate is not None and gate["action"] in ("raise", "abstain") else None


def limit_of_tries(threshold: float | None, max_tries: Any, measure: Any) -> Limit:
    """Check the arguments that all retrying engines share, and return the limit of an answer.

    Raises:
        ConfigError: ``max_tries`` is not a whole number above 0, ``measure`` is unknown, or ``threshold`` is outside
            [0, 1] or missing for a measure without a default.
    """
    if isinstance(max_tries, bool) or not isinstance(max_tries, int) or max_tries < 1:
        raise ConfigError(f"max_tries must be a whole number, at least 1 (got {max_tries!r}).")
    if measure is not None and measure not in get_args(Measure):
        raise ConfigError(f"measure must be one of {', '.join(map(repr, get_args(Measure)))} (got {measure!r}).")
    if measure == "mean_risk" and threshold is None:
        raise ConfigError("measure='mean_risk' has no default threshold; give one.")
    if measure is None:
        return Limit(threshold)
    return Limit(threshold, "answer_risk" if measure == "answer_risk" else "risk")


def settings_of_tries(alpha: float, settings: Any, alphas: Any, max_tries: int) -> list[Mapping[str, Any]]:
    """The settings that each further attempt changes. By default alpha is doubled each time.

    Args:
        alpha: that of the first attempt.
        settings: a dict of settings for each further attempt; the last one is used for all remaining ones.
        alphas: the same for alpha alone.
        max_tries: the number of attempts.

    Raises:
        ConfigError: both are given, one of them is no list or is empty, or an alpha is out of range.
    """
    if settings is not None and alphas is not None:
        raise ConfigError("settings and alphas are both given; alphas=[5.0] is short for settings=[{'alpha': 5.0}].")
    if settings is None and alphas is None:
        alphas = [alpha * 2**number for number in range(1, max_tries)] or [alpha]
    name, given, what = ("settings", settings, "dicts of settings") if alphas is None else ("alphas", alphas, "numbers")
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"{name} takes a list of {what}, one for each further attempt (got {given!r}).")
    if alphas is not None:
        given = [{"alpha": CocoaConfig(alpha=one).alpha} for one in given]
    for one in given:
        if not isinstance(one, Mapping):
            raise ConfigError(f"settings takes a dict for each further attempt, not {one!r}.")
    return [*given, *[given[-1]] * max_tries][: max_tries - 1]


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
