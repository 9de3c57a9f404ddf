"""Attempts to answer a question: which one is good enough, and the history that the answer carries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_engine.report import GateReport, ReportEntry, RiskReport, finite, severity
from cocoa_integrations._shared.limits import GateMetric, Limit, Mark, kind_of, reaches, require_known, require_reaction

TRIES_KEY = "cocoa_tries"

Measure = Literal["max_risk", "mean_risk", "answer_risk"]
"""The value of a report that is compared with the threshold."""

OnRisk = Literal["keep", "raise", "mark", "abstain"]
"""What happens to the answer if every attempt is too risky: it is returned as it is; the error is raised; its risky
spans are marked; or another text replaces it."""

AnswerT = TypeVar("AnswerT")


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


class RetryPlan:
    """What the attempts at an answer are, checked.

    Args:
        alpha: that of the first attempt.
        retriever: the retriever of the first attempt.
        top_k: how many documents it returns; ``None`` if that cannot be changed.
        has_second: whether a second retriever adds documents to those of further attempts.
        is_same: whether a call with some settings is the same as one without them. It refuses unknown settings.
        threshold, max_tries, settings, alphas, top_k_growth, measure, on_risk, mark, answer: the options of a retry.

    Attributes:
        steps: the settings that each attempt changes, the first one none.
        growth: the factor by which the number of documents grows with each attempt.
        limit: the value from which a risk is too high.
    """

    def __init__(
        self,
        *,
        alpha: float,
        retriever: Any,
        top_k: int | None,
        has_second: bool,
        is_same: Callable[[Mapping[str, Any]], bool],
        threshold: float | None,
        max_tries: int,
        settings: Any,
        alphas: Any,
        top_k_growth: float | None,
        measure: Measure | None,
        on_risk: OnRisk,
        mark: Mark,
        answer: str,
    ) -> None:
        if isinstance(max_tries, bool) or not isinstance(max_tries, int) or max_tries < 1:
            raise ConfigError(f"max_tries must be a whole number, at least 1 (got {max_tries!r}).")
        if measure is not None:
            require_known("measure", measure, Measure)
        if measure == "mean_risk" and threshold is None:
            raise ConfigError("measure='mean_risk' has no default threshold; give one.")
        require_reaction(on_risk, OnRisk, mark, answer)
        self.measure, self.on_risk, self.mark, self.answer = measure, on_risk, mark, answer
        metric: GateMetric | None = None if measure is None else "answer_risk" if measure == "answer_risk" else "risk"
        self.limit = Limit(threshold, metric)
        self.growth = _growth_of(top_k_growth, has_second=has_second)
        if self.growth > 1 and max_tries > 1 and top_k is None:
            raise ConfigError(
                f"a {type(retriever).__name__} has no number of documents to increase (similarity_top_k, or k); give a "
                "second_retriever, or top_k_growth=1 to change only the settings."
            )
        self.steps: list[Mapping[str, Any]] = [{}, *_settings_of(alpha, settings, alphas, max_tries)]
        same = [is_same(step) for step in self.steps]
        if max_tries > 1 and self.growth == 1 and not has_second and all(same):
            raise ConfigError(
                "every attempt would be the same: the settings do not change and nothing more is retrieved. Give "
                "settings, a top_k_growth above 1 or a second_retriever."
            )

    @property
    def limit_of_spans(self) -> Limit:
        """The threshold of the spans that are marked: that of the tries where these compare spans, else the spans'."""
        return Limit(self.limit.threshold if self.measure in (None, "max_risk") else None, "risk")

    def measure_of(self, report: RiskReport) -> Measure:
        """The risk of a report that is compared."""
        if self.measure is not None:
            return self.measure
        return "answer_risk" if self.limit.metric_for(report) == "answer_risk" else "max_risk"


class Tries(Generic[AnswerT]):
    """The answers of the attempts so far."""

    def __init__(self, plan: RetryPlan) -> None:
        self._plan = plan
        self._answers: list[tuple[AnswerT, RiskReport | None]] = []
        self._history: list[dict[str, Any]] = []
        self._passed: int | None = None

    def add(self, answer: AnswerT, report: RiskReport | None, /, **entry: Any) -> bool:
        """Add an attempt, and return whether its risk is below the threshold.

        It is not without a report, if the risk is not a finite number, or if a gate has withheld the answer. A
        threshold that was given applies to every answer, whatever the ``risk_source`` of its report is; without one
        each answer has its own.
        """
        risk = None if report is None else finite(self._risk(report))
        self._answers.append((answer, report))
        wire = None if report is None else report.to_dict()
        self._history.append({**entry, "cocoa_risk": wire, "risk": risk, "chosen": False})
        passed = report is not None and risk is not None and not reaches(risk, self._plan.limit.threshold_for(report))
        passed = passed and _withheld(report) is None
        if passed and self._passed is None:
            self._passed = len(self._answers) - 1
        return passed

    def best(self) -> tuple[AnswerT, list[dict[str, Any]]]:
        """The first answer below the threshold, or else the first of the least risky, and the history of all attempts.

        Only risks of one kind are compared: the kind of the first attempt whose risk is a finite number. The risk of
        an answer and that of a span are different probabilities, and risks with different ``risk_source`` are on
        different scales. Without any finite risk it is the first answer. The history has the JSON form of :class:`Try`.
        """
        number = self._best()
        self._history[number]["chosen"] = True
        return self._answers[number][0], self._history

    def gate(self) -> GateReport | None:
        """What is done to the best answer, as the ``gate`` of its report; ``None`` if it is returned as it is."""
        if self._passed is not None:
            return None
        number, on_risk = self._best(), self._plan.on_risk
        _, report = self._answers[number]
        value: float | None = self._history[number]["risk"]
        metric = None if report is None else str(self._plan.measure_of(report))
        threshold = None if report is None else finite(self._plan.limit.threshold_for(report))
        gate = _withheld(report)
        if gate is not None:
            metric, threshold, value = gate.metric, gate.threshold, gate.value
            if gate.action == "raise" and on_risk != "abstain":
                on_risk = "raise"
        if on_risk == "keep" or (on_risk == "mark" and gate is not None):
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
        return GateReport(action=on_risk, metric=metric, threshold=threshold, value=value)

    def _best(self) -> int:
        if self._passed is not None:
            return self._passed
        kinds = [self._kind_of(report) for _, report in self._answers]
        first = next((kind for kind in kinds if kind is not None), None)
        risks = [
            severity(entry["risk"] if kind == first else None) for entry, kind in zip(self._history, kinds, strict=True)
        ]
        return min(range(len(risks)), key=risks.__getitem__)

    def _risk(self, report: RiskReport) -> float:
        measure = self._plan.measure_of(report)
        return self._plan.limit.value(report) if measure == "answer_risk" else severity(getattr(report, measure))

    def _kind_of(self, report: RiskReport | None) -> tuple[str, str | None] | None:
        """What the risk of an attempt is; `None` if it has none."""
        if report is None or finite(self._risk(report)) is None:
            return None
        return kind_of(self._plan.measure_of(report), report)


def _withheld(report: RiskReport | None) -> GateReport | None:
    """The entry of the gate that withheld an answer; `None` if none did."""
    gate = None if report is None else report.gate
    return gate if gate is not None and gate.action in ("raise", "abstain") else None


def _settings_of(alpha: float, settings: Any, alphas: Any, max_tries: int) -> list[Mapping[str, Any]]:
    """The settings that each further attempt changes. By default alpha is doubled each time."""
    if settings is not None and alphas is not None:
        raise ConfigError("settings and alphas are both given; alphas=[5.0] is short for settings=[{'alpha': 5.0}].")
    if settings is None and alphas is None:
        alphas = [alpha * 2**number for number in range(1, max_tries)] or [alpha]
    name, values, what = (
        ("settings", settings, "dicts of settings") if alphas is None else ("alphas", alphas, "numbers")
    )
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"{name} takes a list of {what}, one for each further attempt (got {values!r}).")
    if alphas is not None:
        values = [{"alpha": CocoaConfig(alpha=value).alpha} for value in values]
    for changed in values:
        if not isinstance(changed, Mapping):
            raise ConfigError(f"settings takes a dict for each further attempt, not {changed!r}.")
    return [*values, *[values[-1]] * max_tries][: max_tries - 1]


def _growth_of(growth: Any, *, has_second: bool) -> float:
    """The factor by which the number of documents grows with each attempt: 2, or 1 with a second retriever."""
    if growth is None:
        return 1.0 if has_second else 2.0
    is_number = isinstance(growth, (int, float)) and not isinstance(growth, bool)
    if not is_number or not math.isfinite(growth) or growth < 1:
        raise ConfigError(f"top_k_growth must be a finite number, at least 1 (got {growth!r}).")
    return float(growth)
