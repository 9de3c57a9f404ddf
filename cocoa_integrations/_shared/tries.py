"""Attempts to answer a question: which one is good enough, and the history that the answer carries."""

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cocoa_engine import CocoaConfig
from cocoa_engine.errors import ConfigError, HallucinationRiskError, explain
from cocoa_engine.report import GateReport, ReportEntry, RiskReport, finite, severity
from cocoa_integrations._shared.edits import Change, replacement
from cocoa_integrations._shared.limits import GateMetric, Limit, kind_of, reaches, require_reaction

TRIES_KEY = "cocoa_tries"

Measure = Literal["max_risk", "mean_risk", "answer_risk"]  # the value of a report that is compared
OnRisk = Literal["keep", "raise", "mark", "abstain"]  # what happens if every attempt is too risky

_METRICS: dict[Measure, GateMetric] = {"max_risk": "risk", "mean_risk": "risk", "answer_risk": "answer_risk"}
AnswerT = TypeVar("AnswerT")
Result = TypeVar("Result")


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


class RetryPlan(BaseModel):
    """What the attempts at an answer are: the options of a retry, checked, and what the first attempt is."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    alpha: float
    retriever: Any
    top_k: int | None  # how many documents the retriever returns; None if that cannot be changed
    has_second: bool  # whether a second retriever adds documents to those of further attempts
    is_same: Callable[[Mapping[str, Any]], bool]  # whether settings change nothing; refuses unknown ones
    threshold: Any
    max_tries: Annotated[int, Field(strict=True, ge=1)]
    settings: Annotated[Sequence[dict[str, Any]], Field(min_length=1)] | None
    alphas: Annotated[Sequence[float], Field(min_length=1)] | None
    top_k_growth: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] | None
    measure: Measure | None
    on_risk: Any
    mark: Any
    answer: Any

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(explain(error)) from None

    def model_post_init(self, context: Any) -> None:
        if self.measure == "mean_risk" and self.threshold is None:
            raise ConfigError("measure='mean_risk' has no default threshold; give one.")
        require_reaction(self.on_risk, OnRisk, self.mark, self.answer)
        if self.growth > 1 and self.max_tries > 1 and self.top_k is None:
            raise ConfigError(
                f"a {type(self.retriever).__name__} has no number of documents to increase (similarity_top_k, or k); "
                "give a second_retriever, or top_k_growth=1 to change only the settings."
            )
        if self.settings is not None and self.alphas is not None:
            raise ConfigError(
                "settings and alphas are both given; alphas=[5.0] is short for settings=[{'alpha': 5.0}]."
            )
        same = [self.is_same(step) for step in self.steps]
        if self.max_tries > 1 and self.growth == 1 and not self.has_second and all(same):
            raise ConfigError(
                "every attempt would be the same: the settings do not change and nothing more is retrieved. Give "
                "settings, a top_k_growth above 1 or a second_retriever."
            )
        self.limit  # noqa: B018  # checks the threshold

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """The settings that each attempt changes, the first one none. By default alpha is doubled each time."""
        doubled = (self.alpha * 2**number for number in range(1, self.max_tries))  # not computed beside others
        values = [*(self.settings or ())] or [
            {"alpha": CocoaConfig(alpha=alpha).alpha} for alpha in self.alphas or doubled
        ]
        return [{}, *[*values, *values[-1:] * self.max_tries][: self.max_tries - 1]]

    @property
    def growth(self) -> float:
        """The factor by which the number of documents grows: 2, or 1 with a second retriever."""
        return self.top_k_growth or (1.0 if self.has_second else 2.0)

    @cached_property
    def limit(self) -> Limit:
        return Limit(self.threshold, None if self.measure is None else _METRICS[self.measure])

    def measured(self, report: RiskReport) -> tuple[Measure, float]:
        is_whole = self.limit.metric_for(report) == "answer_risk"
        measure: Measure = "answer_risk" if is_whole else self.measure or "max_risk"
        return measure, severity(getattr(report, measure))

    def change(self, gate: GateReport, text: str, report: RiskReport) -> Change:
        """What becomes of the text of the best answer: another text, or marks around the risky spans."""
        if gate.action == "abstain":
            return replacement(report, self.answer)
        threshold = self.limit.threshold if self.measure in (None, "max_risk") else None
        return Limit(threshold, "risk").with_marks(text, report, self.mark)


class Attempts(Generic[AnswerT]):
    """The answers so far. The best one is the first that passes, or the first of the least risky ones of a kind."""

    def __init__(self) -> None:
        self.answers: list[AnswerT] = []
        self.values: list[float | None] = []
        self.best_number, self.has_passed = 0, False
        self._kind: Any = None
        self._lowest = math.inf

    def append(self, answer: AnswerT, value: float | None, kind: Any, *, passes: bool) -> None:
        self.answers.append(answer)
        self.values.append(finite(value))
        if self._kind is None and finite(value) is not None:
            self._kind = kind
        is_lower = kind == self._kind and severity(value) < self._lowest
        if is_lower:
            self._lowest = severity(value)
        if not self.has_passed and (passes or is_lower):
            self.best_number = len(self.answers) - 1
        self.has_passed = self.has_passed or passes


class Tries(Attempts[AnswerT]):
    """The attempts of a plan, and their history in the JSON form of :class:`Try`."""

    def __init__(self, plan: RetryPlan) -> None:
        super().__init__()
        self._plan = plan
        self._reports: list[RiskReport | None] = []
        self._history: list[dict[str, Any]] = []

    def add(self, answer: AnswerT, report: RiskReport | None, /, **entry: Any) -> bool:
        """Add an attempt, and return whether it passes: not if a gate has withheld it, or without a finite risk."""
        measure, risk = (None, None) if report is None else self._plan.measured(report)
        passes = report is not None and not reaches(severity(risk), self._plan.limit.threshold_for(report))
        passes = passes and finite(risk) is not None and _withheld(report) is None
        self.append(answer, risk, kind_of(measure, report) if report and measure else None, passes=passes)
        self._reports.append(report)
        wire = None if report is None else report.to_dict()
        self._history.append({**entry, "cocoa_risk": wire, "risk": self.values[-1], "chosen": False})
        return passes

    def best(self) -> tuple[AnswerT, list[dict[str, Any]]]:
        self._history[self.best_number]["chosen"] = True
        return self.answers[self.best_number], self._history

    def gate(self) -> GateReport | None:
        """What is done to the best answer; ``None`` if it is returned as it is. It may raise the error."""
        if self.has_passed:
            return None
        report, value, action = self._reports[self.best_number], self.values[self.best_number], self._plan.on_risk
        metric: str | None = None if report is None else self._plan.measured(report)[0]
        threshold = None if report is None else finite(self._plan.limit.threshold_for(report))
        if (gate := _withheld(report)) is not None:
            metric, threshold, value = gate.metric, gate.threshold, gate.value
            if gate.action == "raise" and action != "abstain":
                action = "raise"
        if action == "keep" or (action == "mark" and gate is not None):
            return None
        if action == "raise":
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
        return GateReport(action=action, metric=metric, threshold=threshold, value=value)


def _withheld(report: RiskReport | None) -> GateReport | None:
    """The entry of the gate that withheld an answer; `None` if none did."""
    gate = None if report is None else report.gate
    return gate if gate is not None and gate.action in ("raise", "abstain") else None


def run_blocking(call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that waits for nothing, because it was told to make blocking calls."""
    try:
        call.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise RuntimeError("the coroutine waits for something")
