"""The retries of both frameworks have the same options, in the same order, with the same defaults and descriptions."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoa_engine.errors import HallucinationRiskError
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.tries import Measure, OnRisk, Tries
from cocoa_integrations.langchain import with_citations, with_risk_retry
from cocoa_integrations.llama_index import RiskCitationQueryEngine, RiskRetryQueryEngine
from tests.helpers.reports import made_report, retry_plan

ONLY_LANGCHAIN = ("question", "context", "format_documents", "return_documents", "prompt", "chat", "retriever")


def options_of(function: object, leave_out: tuple[str, ...]) -> list[tuple[str, object, str]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in leave_out]
    return [(one.name, one.default, str(one.annotation)) for one in named]


def test_retries_have_the_same_options() -> None:
    here, there = (options_of(one, ONLY_LANGCHAIN) for one in (with_risk_retry, RiskRetryQueryEngine))
    by_framework = {"second_retriever"}  # the class of a retriever is the framework's
    assert [one[:2] for one in here] == [one[:2] for one in there]
    assert [one for one in here if one[0] not in by_framework] == [one for one in there if one[0] not in by_framework]


def test_citations_have_the_same_options() -> None:
    here, there = (options_of(one, ONLY_LANGCHAIN) for one in (with_citations, RiskCitationQueryEngine))
    assert here == [one for one in there if one[0] != "context_lift"]


def report(risk: float) -> RiskReport:
    return made_report([risk], threshold=0.5, answer_risk=risk, answer_threshold=0.5)


@given(
    risks=st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=4),
    threshold=st.floats(0, 1),
    measure=st.sampled_from([None, *get_args(Measure)]),
    on_risk=st.sampled_from(get_args(OnRisk)),
)
def test_an_answer_is_refused_if_no_attempt_is_below_the_threshold(
    risks: list[float | None], threshold: float, measure: Any, on_risk: Any
) -> None:
    tries = Tries[int](retry_plan(threshold, len(risks), measure, on_risk))
    for number, risk in enumerate(risks):  # without a risk: nothing was retrieved, and no model was asked
        if tries.add(number, None if risk is None else report(risk)):
            break
    answer, _ = tries.best()
    chosen = risks[answer]
    if on_risk == "keep" or (chosen is not None and chosen < threshold):
        assert tries.gate() is None
    elif on_risk == "raise":
        with pytest.raises(HallucinationRiskError, match="has no report" if chosen is None else "reaches"):
            tries.gate()
    else:
        gate = tries.gate()
        assert gate is not None
        assert (gate.action, gate.value) == (on_risk, chosen)
        assert not any(risk is not None and risk < threshold for risk in risks)
