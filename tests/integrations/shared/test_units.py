"""Claims and sentences in reports, and thresholds on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableGenerator

from cocoa_engine import ConfigError, DataError, HallucinationRiskError
from cocoa_engine.report import RiskReport, measured_text
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations.langchain import risk_gate
from cocoa_integrations.tracing import Scoring
from tests.helpers.made_up_answers import generation
from tests.helpers.reports import all_spans, made_report, risk_report

PARTS = (("The Seine", 0.6), (" is", 0.9), (" long", 0.2), (".", 0.99), (" It ends", 0.3), (".", 0.1))
TEXT = "".join(text for text, _ in PARTS)


def report(**changes: Any) -> RiskReport:
    return RiskReport.of(generation(*PARTS)).with_values(**{"threshold": 0.5, **changes})


@pytest.mark.parametrize("wrong", ["0.5", "high", 10**400, [1], {}, True])
@pytest.mark.parametrize("name", ["max_risk", "threshold", "claims"])
def test_a_number_of_another_type_is_refused(name: str, wrong: object) -> None:
    wire = report().to_dict()
    value = [{**wire["claims"][0], "risk": wrong}] if name == "claims" else wrong
    with pytest.raises(DataError, match=r"valid|large"):
        RiskReport.from_wire({**wire, name: value})


def test_a_compact_report_keeps_them_small() -> None:
    full = report()
    assert [(one.text, one.risk) for one in full.check] == [("Seine", 0.6), ("ends", 0.3)]
    assert [TEXT[one.start : one.end] for one in full.claims] == ["Seine", "long", "ends"]
    assert [TEXT[one.start : one.end] for one in full.sentences] == ["The Seine is long.", "It ends."]
    compact = full.compact(TEXT)
    wire = compact.to_dict()
    assert RiskReport.from_wire(wire) == compact
    assert compact.sentences == full.sentences
    assert "claims" not in wire
    assert not any("text" in span for span in wire["spans"])
    check = full.check[0]
    assert wire["check"][0] == {
        "text": "Seine",
        "start": check.start,
        "end": check.end,
        "risk": check.risk,
        "reasons": ["the model was unsure"],
    }
    expanded = compact.expanded(TEXT)
    assert [span.text for span in expanded.spans] == [text for text, _ in PARTS]
    assert Limit(0.5, unit="claim").reached(expanded)
    assert all(span.text is None for span in compact.expanded("another text").spans)


@pytest.mark.parametrize(
    ("unit", "threshold", "risky"),
    [
        ("span", 0.95, ["."]),
        ("claim", 0.95, []),
        ("claim", 0.5, ["Seine"]),
        ("claim", 0.25, ["Seine", "ends"]),
        ("sentence", 0.35, ["The Seine is long."]),
        ("sentence", 0.5, []),
    ],
)
def test_a_threshold_applies_to_spans_claims_or_sentences(unit: Any, threshold: float, risky: list[str]) -> None:
    limit = Limit(threshold, unit=unit)
    assert [(part.text or "").strip() for part, _ in limit.risky(report().spans)] == risky
    assert limit.reached(report()) is bool(risky)


def test_spans_stand_in_where_a_text_is_missing() -> None:
    """The text of a compact report's spans is lost with that of its message."""
    spans = [span.without("text") for span in report().spans]
    assert measured_text(spans, lambda span: span.risk) is None
    assert Limit(0.95, unit="claim").reached(report(spans=spans))


@pytest.mark.parametrize("wire", [None, [], "report", {}, {"spans": [{}]}, {**report().to_dict(), "spans": [1]}])
def test_what_is_no_report_is_refused(wire: Any) -> None:
    with pytest.raises(DataError):
        RiskReport.from_wire(wire)


def test_errors_name_the_claim() -> None:
    error = Limit(0.5, unit="claim").error(report())
    assert isinstance(error, HallucinationRiskError)
    assert ("'Seine'" in str(error), error.value) == (True, 0.6)
    with pytest.raises(ConfigError, match="claim"):
        Limit(0.5, unit="clam")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="answer_risk"):
        Limit(0.5, "answer_risk", unit="claim")


def test_a_score_counts_the_visible_spans_of_the_answer_only() -> None:
    texts, parts = ("So", "Hello", "\n"), ("reasoning", "answer", "answer")
    spans = [
        span.with_values(text=text, part=part)
        for span, text, part in zip(made_report([0.9, 0.3, 0.8]).spans, texts, parts, strict=True)
    ]
    given = RiskReport.of_spans(spans, risk_source="calibrator")
    assert (Scoring(threshold=0.5).score(given), Scoring(threshold=0.5).label(given)) == (0.3, "pass")
    assert Scoring(threshold=0.3).label(given) == "fail"
    assert Scoring(threshold=0.5).score(RiskReport.of_spans(spans[2:])) == 0.0


ANSWER = generation(*PARTS)


def message_of(**more: Any) -> AIMessage:
    return AIMessage(ANSWER.text, response_metadata={"cocoa_risk": {**risk_report(ANSWER), "threshold": 0.5, **more}})


def test_a_gate_compares_the_risk_of_the_answer_where_there_is_one() -> None:
    low, high = (message_of(answer_risk=risk, answer_threshold=0.7) for risk in (0.6, 0.7))
    assert risk_gate().invoke(low) is low
    with pytest.raises(HallucinationRiskError, match="answer_risk of the answer"):
        risk_gate().invoke(high)
    gate = risk_gate(on_risk="abstain").invoke(high).response_metadata["cocoa_risk"]["gate"]
    assert gate == {"action": "abstain", "metric": "answer_risk", "threshold": 0.7, "value": 0.7}
    for spans in (risk_gate(0.9), risk_gate(unit="claim"), risk_gate(metric="risk", threshold=0.9)):
        with pytest.raises(HallucinationRiskError, match=r"^risk of"):
            spans.invoke(low)
    assert risk_gate(0.9, on_risk="mark").invoke(low).text == "The Seine [[is]] long. It ends."


@pytest.mark.parametrize(
    ("unit", "threshold", "mark", "text"),
    [
        ("claim", None, "[[{text}]]", "The [[Seine]] is long. It ends."),
        ("claim", 0.25, "[[{text}|{value:.1f}]]", "The [[Seine|0.6]] is long. It [[ends|0.3]]."),
        ("sentence", 0.35, "<{text}>", "<The Seine is long>. It ends."),
        ("span", 0.5, "<{text}>", "<The Seine> <is> long. It ends."),
    ],
)
def test_marks_of_an_answer_and_of_a_stream(unit: Any, threshold: float | None, mark: str, text: str) -> None:
    gate = risk_gate(threshold, unit=unit, on_risk="mark", mark=mark)
    marked = gate.invoke(message_of())
    assert marked.text == text
    entry = marked.response_metadata["cocoa_risk"]["gate"]
    assert (entry.get("unit", "span"), entry["threshold"]) == (unit, threshold or 0.5)
    assert ("unit" in entry) == (unit != "span")

    def chunks(given: Iterator[Any]) -> Iterator[AIMessageChunk]:
        for span in all_spans(ANSWER):
            yield AIMessageChunk(span["text"], additional_kwargs={"cocoa_spans": [span]})
        yield AIMessageChunk("", response_metadata=message_of().response_metadata, chunk_position="last")

    assert "".join(chunk.text for chunk in (RunnableGenerator(chunks) | gate).stream("")) == text


def test_middleware_takes_the_unit() -> None:
    middleware = pytest.importorskip("cocoa_integrations.langchain.agents")
    by_claim = middleware.RiskMiddleware(0.8, unit="claim")
    assert by_claim.limit.unit == "claim"
    assert by_claim.name != middleware.RiskMiddleware(0.8).name
    report = RiskReport.of(ANSWER)
    assert not by_claim.limit.reached(report)
    assert middleware.RiskMiddleware(0.8).limit.reached(report)
