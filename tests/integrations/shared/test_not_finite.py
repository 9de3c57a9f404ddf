"""A risk that is NaN or infinite passes no gate, and metadata with one is still JSON."""

from __future__ import annotations

import json
import math
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from cocoa_engine import ContextLift, UnitLevel
from cocoa_engine.cli.ask import risk_of
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.citations import with_lifts
from cocoa_integrations._shared.limits import Limit, highest
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations._shared.tries import Tries
from cocoa_integrations.judging import Judgement
from cocoa_integrations.langchain import HallucinationRiskError, RiskCallbackHandler, max_risk, risk_gate
from cocoa_integrations.langchain.agents import RiskMiddleware, RiskyToolCalls
from cocoa_integrations.tool_calling import Plan, ToolRequest, parts_of_report
from cocoa_integrations.tracing import Scoring
from tests.helpers.engines import endless
from tests.helpers.made_up_answers import generation
from tests.helpers.reports import retry_plan

HIGH = 1.0
"""A threshold above every finite value here."""

NOT_FINITE = pytest.mark.parametrize("risk", [math.nan, math.inf])


def report_of(risk: float) -> RiskReport:
    """The report of an answer whose second span has this risk."""
    report = RiskReport.of(generation(("Dune is by ", 0.1), ("Frank", risk), (" Herbert", 0.2)))
    json.dumps(report.to_dict(), allow_nan=False)
    return report


def message_of(risk: float, **more: Any) -> AIMessage:
    return AIMessage(
        "Dune is by Frank Herbert", response_metadata={"cocoa_risk": {**report_of(risk).to_dict(), **more}}
    )


@pytest.mark.parametrize("risk", [math.nan, math.inf, -math.inf])
def test_a_gate_stops_what_a_report_calls_harmless(risk: float) -> None:
    """A report may come from elsewhere: what it says of a risk that is no number does not count."""
    message = message_of(0.1, threshold=0.6)
    span = message.response_metadata["cocoa_risk"]["spans"][1]
    span.update(risk=risk, flagged=False)
    for gate in (risk_gate(metric="risk"), risk_gate(HIGH)):
        with pytest.raises(HallucinationRiskError, match="'Frank' is inf"):
            gate.invoke(message)


@NOT_FINITE
def test_a_gate_stops(risk: float) -> None:
    message = message_of(risk)
    with pytest.raises(HallucinationRiskError, match="'Frank' is inf"):
        risk_gate(HIGH).invoke(message)
    marked = risk_gate(HIGH, on_risk="mark").invoke(message)
    assert marked.content == "Dune is by [[Frank]] Herbert"
    json.dumps(marked.response_metadata, allow_nan=False)
    assert risk_gate(HIGH).invoke(message_of(0.9)).content == "Dune is by Frank Herbert"
    assert max_risk(message) == math.inf


@NOT_FINITE
def test_the_middleware_stops(risk: float) -> None:
    agents = pytest.importorskip("langchain.agents")
    model = GenericFakeChatModel(messages=iter([message_of(risk)]))
    agent = agents.create_agent(model, tools=[], middleware=[RiskMiddleware(HIGH, on_risk="abstain")])
    state = agent.invoke({"messages": [("user", "Who wrote Dune?")]})
    assert state["messages"][-1].text == "I don't know."
    entry = state["cocoa_risks"][0]
    assert (entry["action"], entry["value"], entry["attempts"]) == ("abstain", None, [None])
    json.dumps(state["cocoa_risks"], allow_nan=False)


@NOT_FINITE
def test_a_tool_is_not_called(risk: float) -> None:
    answer = generation(('{"city": "', 0.1), ("Paris", risk), ('"}', 0.1))
    plan = Plan(ToolRequest.of(response_format={"type": "json_object"}), endless())
    city = parts_of_report(answer, plan, Split("", 0, None, answer), [])["fields"]["$.city"].to_dict()
    json.dumps(city, allow_nan=False)
    assert city["risk"] is None
    call = {"name": "weather", "args": {"city": "Paris"}, "id": "1", "type": "tool_call"}
    risks = {"tool_calls": [{"id": "1", "name": "weather", "risk": None, "error": None, "arguments": {"city": city}}]}
    message = AIMessage("", tool_calls=[call], response_metadata={"cocoa_risk": {**report_of(0.1).to_dict(), **risks}})
    assert RiskyToolCalls(HIGH).values(call, [message]) == {"city": math.inf}


@NOT_FINITE
@pytest.mark.parametrize("measure", ["max_risk", "mean_risk"])
def test_a_retry_goes_on_and_prefers_a_finite_risk(risk: float, measure: Any) -> None:
    tries = Tries[str](retry_plan(HIGH, measure=measure))
    assert not tries.add("a", report_of(risk))
    assert not tries.add("raw", report_of(0.1).with_values(**{measure: risk}))
    assert tries.add("b", report_of(0.1))
    best, history = tries.best()
    assert best == "b"
    json.dumps([{**entry, "cocoa_risk": None} for entry in history], allow_nan=False)


@NOT_FINITE
def test_a_judge_a_score_a_collector_and_the_answer_as_a_whole(risk: float) -> None:
    report, handler = report_of(risk), RiskCallbackHandler()
    judgement, scoring = Judgement(risk, "max_risk", HIGH, report), Scoring(threshold=HIGH)
    assert (judgement.passing, scoring.label(report)) == (False, "fail")
    assert "'Frank' (inf)" in judgement.comment
    assert scoring.explanation(report).endswith("the riskiest claim is 'Frank Herbert'")
    handler.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message_of(risk))]]), run_id=uuid4())
    assert handler.max_risk == math.inf
    compact = report.compact()
    assert [part.text for part, _ in Limit(HIGH).risky(compact.spans)] == ["Frank"]
    assert (compact.max_risk, compact.mean_risk) == (None, None)
    answer = generation(("Frank", 0.1)).model_copy(update={"answer_risk": risk, "answer_threshold": 0.5})
    report = RiskReport.of(answer)
    json.dumps(report.to_dict(), allow_nan=False)
    assert Limit(HIGH, "answer_risk").reached(report)
    assert not Tries[str](retry_plan(HIGH, measure="answer_risk")).add("a", report)


def test_the_rest_of_the_metadata_is_json() -> None:
    spans = report_of(0.1).spans
    lift = ContextLift.model_construct(log_prob=math.inf, con_mlds=math.nan, f_mlds=0.1)
    json.dumps([span.to_dict() for span in with_lifts(spans, [lift] * 3)], allow_nan=False)
    answer = generation(("a", 0.1))
    certain = answer.spans[0].model_copy(
        update={"token_ids": [70], "token_log_probs": [-math.inf], "top_log_probs": [[(70, 0.0), (71, -math.inf)]]}
    )
    entries = TokenLogprobs(endless()).of_answer([certain])
    assert "-9999.0" in json.dumps(entries, allow_nan=False)


def test_a_risk_that_was_not_measured_is_another_matter() -> None:
    answer = generation(("Dune is by ", 0.1), ("Frank", 0.2), (" Herbert", 0.3))
    spans = [answer.spans[0].model_copy(update={"risk": None}), *answer.spans[1:]]
    report = RiskReport.of(answer.model_copy(update={"spans": spans}))
    assert (report.max_risk, report.mean_risk) == (0.3, 0.25)
    for each in (report, report.compact()):
        assert each.spans[0].risk is None
        assert Limit(HIGH).risky(each.spans) == []
        assert highest(each.spans, "risk") == 0.3
        assert Limit(0.0, "f_mlds").risky([each.spans[0].with_values(f_mlds=None)])


@NOT_FINITE
@pytest.mark.parametrize("unit", ["claim", "sentence"])
@pytest.mark.parametrize("where", ["It", ".", " Yes"])
def test_a_risk_outside_all_claims_stops(risk: float, unit: UnitLevel, where: str) -> None:
    texts = [" Yes", ", it", " is", "."] if where == " Yes" else ["It", " is by Frank", " Herbert", "."]
    answer = generation(*((text, risk if where in (text, " Yes") else 0.1) for text in texts))
    report = RiskReport.of(answer.model_copy(update={"threshold": 0.6}))
    message = AIMessage(answer.text, response_metadata={"cocoa_risk": report.to_dict()})
    for limit in (Limit(HIGH, unit=unit), Limit(unit=unit)):
        assert limit.reached(report)
        assert limit.value(report) == math.inf
    assert risk_gate(unit=unit, on_risk="abstain").invoke(message).content == "I don't know."
    with pytest.raises(HallucinationRiskError, match="is inf"):
        risk_gate(HIGH, unit=unit).invoke(message)
    if unit == "claim" and where != " Yes":
        marked = risk_gate(HIGH, unit=unit, on_risk="mark").invoke(message)
        mark = "." if where == "." else f"[[{where}]]"  # the gate acts, but punctuation is not marked
        assert marked.content == answer.text.replace(where, mark)
    assert not math.isfinite(risk_of(answer))


@NOT_FINITE
@pytest.mark.parametrize("unit", ["claim", "sentence"])
def test_white_space_and_an_unmeasured_risk_pass(risk: float, unit: UnitLevel) -> None:
    answer = generation(("It", 0.2), (" is", 0.1), ("\n\n", risk), ("Dune", 0.3), (".", 0.2))
    first = answer.spans[0].model_copy(update={"risk": None, "risk_source": "source_attention"})
    report = RiskReport.of(answer.model_copy(update={"spans": [first, *answer.spans[1:]]}))
    assert not Limit(HIGH, unit=unit).reached(report)
    assert Limit(HIGH, unit=unit).value(report) == 0.3
