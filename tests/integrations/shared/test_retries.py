"""Thresholds of answers, and retries, which have the same options in both frameworks."""

from __future__ import annotations

import inspect
import pickle
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle

from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations._shared.tries import Measure, OnRisk, RetryPlan, Tries
from cocoa_integrations.langchain import with_citations, with_risk_retry
from cocoa_integrations.llama_index import CocoaLLM, RiskCitationQueryEngine, RiskRetryQueryEngine
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
        whole = {"threshold": 0.5, "answer_risk": risk, "answer_threshold": 0.5}
        if tries.add(number, None if risk is None else made_report([risk], **whole)):
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


def test_without_a_number_the_threshold_is_that_of_the_report() -> None:
    limit = Limit()
    assert limit.reached(made_report([0.1, 0.7], threshold=0.6))
    assert not limit.reached(made_report([0.1, 0.5], threshold=0.6))
    assert limit.threshold_for(made_report([0.1], threshold=0.6)) == 0.6
    assert not limit.reached(made_report([]))
    with pytest.raises(ConfigError, match="has no threshold of risk"):
        limit.reached(made_report([0.9]))
    assert limit.error(made_report([0.1, 0.7], threshold=0.6)).threshold == 0.6


def test_the_answer_as_a_whole() -> None:
    limit = Limit(0.5, "answer_risk")
    assert limit.reached(made_report([0.0], answer_risk=0.5))
    assert not limit.reached(made_report([1.0], answer_risk=0.4))
    assert "answer_risk of the answer is 0.5" in str(limit.error(made_report([0.0], answer_risk=0.5)))
    assert Limit(None, "answer_risk").reached(made_report([0.0], answer_risk=0.8, answer_threshold=0.7))
    with pytest.raises(ConfigError, match="no calibrator for answers"):
        limit.reached(made_report([0.9]))


def test_without_a_metric_the_risk_of_the_answer_is_compared_where_there_is_one() -> None:
    limit, whole = Limit(), {"answer_risk": 0.75, "answer_threshold": 0.7}
    assert limit.reached(made_report([0.1], threshold=0.6, **whole))
    assert limit.error(made_report([0.1], threshold=0.6, **whole)).metric == "answer_risk"
    assert not limit.reached(made_report([0.9], threshold=0.6, **{**whole, "answer_risk": 0.5}))
    assert limit.value(made_report([0.9], threshold=0.6, **whole)) == 0.75
    assert len(limit.risky(made_report([0.9, 0.1], threshold=0.6, **whole).spans)) == 1  # of spans, still by their own
    assert limit.metric_for(made_report([0.9], threshold=0.6)) == "risk"
    assert limit.error(made_report([0.9], threshold=0.6)).metric == "risk"
    assert limit.reached(made_report([0.1], threshold=0.6, answer_risk=float("nan"), answer_threshold=0.7))


@pytest.mark.parametrize(
    "limit",
    [Limit(0.6), Limit(unit="claim"), Limit(metric="risk")],
    ids=["threshold", "unit", "metric"],
)
def test_a_number_a_unit_or_a_metric_chooses_the_risk_of_spans(limit: Limit) -> None:
    assert limit.metric == "risk"
    assert not limit.reached(made_report([0.1], threshold=0.6, answer_risk=0.9, answer_threshold=0.7))


def test_a_retry_is_compared_with_its_like_and_one_that_passes_is_chosen() -> None:
    whole = {"threshold": 0.6, "answer_threshold": 0.7}
    tries = Tries[str](retry_plan(None, 3, None))
    tries.add("nothing", None)
    tries.add("first", made_report([0.3], answer_risk=0.8, **whole))
    tries.add("span", made_report([0.75], threshold=0.6))
    assert tries.best()[0] == "first"
    tries.add("lower", made_report([0.3], answer_risk=0.72, **whole))
    assert tries.best()[0] == "lower"
    assert tries.add("passes", made_report([0.5], threshold=0.6))
    assert tries.best()[0] == "passes"


@pytest.mark.parametrize("measure", [None, "max_risk", "mean_risk"])
def test_risks_of_different_sources_are_not_ranked_under_a_number(measure: Any) -> None:
    tries = Tries[str](retry_plan(0.3, 4, measure))
    tries.add("not measured", made_report([float("nan")], risk_source="token_probability"))
    tries.add("first", made_report([0.8]))
    assert not tries.add("other source", made_report([0.4], risk_source="source_attention"))
    assert tries.best()[0] == "first"
    tries.add("lower", made_report([0.7]))
    assert tries.best()[0] == "lower"
    assert tries.add("passes", made_report([0.1], risk_source="source_attention"))  # the number is for every answer
    assert tries.best()[0] == "passes"


@pytest.mark.parametrize("metric", ["risk", "answer_risk"])
@pytest.mark.parametrize("threshold", [-0.1, 1.05, 2.0])
def test_a_number_outside_the_scale_is_refused(metric: Any, threshold: float) -> None:
    with pytest.raises(ConfigError, match="metric='f_mlds'"):
        Limit(threshold, metric)
    Limit(abs(threshold), "f_mlds")


def test_a_raw_mlds_is_compared_under_its_own_name() -> None:
    raw = made_report([0.93], risk_source="f_mlds")
    with pytest.raises(ConfigError, match="metric='f_mlds'"):
        Limit(0.5).reached(raw)
    assert Limit(0.5, "f_mlds").reached(raw)
    with pytest.raises(ConfigError, match="no default threshold"):
        Limit(None, "f_mlds")


def test_only_settings_that_are_used_are_computed() -> None:
    options = dict(retry_plan())
    assert RetryPlan(**{**options, "max_tries": 1, "alpha": 1e6}).steps == [{}]
    many = RetryPlan(**{**options, "max_tries": 2000, "settings": [{"alpha": 5.0}]})
    assert many.steps == [{}, *[{"alpha": 5.0}] * 1999]


class NoNodes(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return []


def test_an_engine_can_be_sent_to_another_process() -> None:
    llm = CocoaLLM(base_url="http://localhost:1/v1", context_window=100)
    engine = RiskRetryQueryEngine(NoNodes(), llm, top_k_growth=1, alphas=[5.0], max_tries=2)
    assert pickle.loads(pickle.dumps(engine)).retrieve(QueryBundle("a")) == []
