"""Claims and sentences in reports, and thresholds on them."""

from __future__ import annotations

from typing import Any

import pytest

from cocoa_engine import ConfigError, DataError, HallucinationRiskError
from cocoa_engine.report import RiskReport, measured_text
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations.tracing import Scoring
from tests.helpers.made_up_answers import generation
from tests.helpers.reports import made_report

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


def test_marks_stand_around_claims_and_sentences() -> None:
    def marked(limit: Limit, mark: str) -> str:
        text = EditedText.of(TEXT, report())
        return text.changed(limit.mark_edits(text.spans(report().spans), mark)).text

    assert marked(Limit(0.25, unit="claim"), "[[{text}|{value:.1f}]]") == "The [[Seine|0.6]] is long. It [[ends|0.3]]."
    assert marked(Limit(0.35, unit="sentence"), "<{text}>") == "<The Seine is long>. It ends."
    assert marked(Limit(0.5), "<{text}>") == "<The Seine> <is> long. It ends."


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
