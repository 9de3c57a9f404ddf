"""Gates and helpers that compare claims or sentences with the threshold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableGenerator

from cocoa_engine import HallucinationRiskError
from cocoa_engine.report import RiskReport
from cocoa_integrations.langchain import risk_gate
from tests.helpers.made_up_answers import generation
from tests.helpers.reports import all_spans, risk_report

ANSWER = generation(("The Seine", 0.6), (" is", 0.9), (" long", 0.2), (".", 0.99))


def message(**more: Any) -> AIMessage:
    return AIMessage(ANSWER.text, response_metadata={"cocoa_risk": {**risk_report(ANSWER), "threshold": 0.5, **more}})


def test_a_gate_compares_the_risk_of_the_answer_where_there_is_one() -> None:
    low, high = (message(answer_risk=risk, answer_threshold=0.7) for risk in (0.6, 0.7))
    assert risk_gate().invoke(low) is low
    with pytest.raises(HallucinationRiskError, match="answer_risk of the answer"):
        risk_gate().invoke(high)
    gate = risk_gate(on_risk="abstain").invoke(high).response_metadata["cocoa_risk"]["gate"]
    assert gate == {"action": "abstain", "metric": "answer_risk", "threshold": 0.7, "value": 0.7}
    for spans in (risk_gate(0.9), risk_gate(unit="claim"), risk_gate(metric="risk", threshold=0.9)):
        with pytest.raises(HallucinationRiskError, match=r"^risk of"):
            spans.invoke(low)
    assert risk_gate(0.9, on_risk="mark").invoke(low).text == "The Seine [[is]] long."


@pytest.mark.parametrize(
    ("unit", "threshold", "text"),
    [("claim", None, "The [[Seine]] is long."), ("sentence", 0.35, "[[The Seine is long]].")],
)
def test_marks_and_the_entry_of_the_gate(unit: Any, threshold: float | None, text: str) -> None:
    marked = risk_gate(threshold, unit=unit, on_risk="mark").invoke(message())
    assert marked.text == text
    gate = marked.response_metadata["cocoa_risk"]["gate"]
    assert (gate["unit"], gate["threshold"]) == (unit, threshold or 0.5)
    assert "unit" not in risk_gate(0.1, on_risk="mark").invoke(message()).response_metadata["cocoa_risk"]["gate"]


def test_a_stream_is_marked_at_its_end() -> None:
    def chunks(given: Iterator[Any]) -> Iterator[AIMessageChunk]:
        for span in all_spans(ANSWER):
            yield AIMessageChunk(span["text"], additional_kwargs={"cocoa_spans": [span]})
        report = {**risk_report(ANSWER), "threshold": 0.5}
        yield AIMessageChunk("", response_metadata={"cocoa_risk": report}, chunk_position="last")

    chain = RunnableGenerator(chunks) | risk_gate(unit="claim", on_risk="mark")
    assert "".join(chunk.text for chunk in chain.stream("")) == "The [[Seine]] is long."


def test_middleware_takes_the_unit() -> None:
    middleware = pytest.importorskip("cocoa_integrations.langchain.agents")
    by_claim = middleware.RiskMiddleware(0.8, unit="claim")
    assert by_claim.limit.unit == "claim"
    assert by_claim.name != middleware.RiskMiddleware(0.8).name
    report = RiskReport.of(ANSWER)
    assert not by_claim.limit.reached(report)
    assert middleware.RiskMiddleware(0.8).limit.reached(report)
