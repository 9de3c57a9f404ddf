"""Claims and sentences in reports, and thresholds on them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError, HallucinationRiskError
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.detail import Stored, compact_report, expanded_report
from cocoa_integrations._shared.edits import EditedText
from cocoa_integrations._shared.limits import Limit, highest
from cocoa_integrations._shared.metadata import risk_report
from cocoa_integrations._shared.reasoning import split_generation
from cocoa_integrations._shared.units import measured_text
from cocoa_integrations.llama_index.shown_text import merged_report, parts_of
from tests.helpers.made_up_answers import generation
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PARTS = (("The Seine", 0.6), (" is", 0.9), (" long", 0.2), (".", 0.99), (" It ends", 0.3), (".", 0.1))
TEXT = "".join(text for text, _ in PARTS)


def report(**changes: Any) -> dict[str, Any]:
    return {**risk_report(generation(*PARTS)), "threshold": 0.5, **changes}


def test_a_report_lists_claims_to_check_and_sentences() -> None:
    full = report()
    TypeAdapter(RiskReport).validate_python(full)
    assert [(one["text"], one["risk"]) for one in full["check"]] == [("Seine", 0.6), ("ends", 0.3)]
    assert full["check"][0]["spans"] == [0]
    assert [TEXT[one["start"] : one["end"]] for one in full["sentences"]] == ["The Seine is long.", "It ends."]
    assert [one["risk"] for one in full["sentences"]] == [pytest.approx(0.4), 0.3]
    assert [(TEXT[one["start"] : one["end"]], one["risk"]) for one in full["claims"]] == [
        ("Seine", 0.6),
        ("long", 0.2),
        ("ends", 0.3),
    ]
    json.dumps(full)


def test_a_compact_report_keeps_them_small() -> None:
    full = report()
    compact = compact_report(full, Stored(TEXT))
    TypeAdapter(RiskReport).validate_python(compact)
    assert compact["sentences"] == full["sentences"]
    assert "claims" not in compact
    assert compact["check"][0] == {
        **{key: full["check"][0][key] for key in ("text", "start", "end", "risk")},
        "reasons": ["the model was unsure"],
    }
    expanded = expanded_report(compact, Stored(TEXT))
    assert expanded is not None
    assert Limit(0.5, unit="claim").reached(expanded)


def test_the_reasoning_is_in_neither() -> None:
    engine = CocoaEngine(tiny_model("llama"), tiny_tokenizer())
    whole = generation(("<think>Lyon", 0.9), ("?</think>", 0.9), ("\n\nParis", 0.4), (" shines.", 0.1))
    full = risk_report(whole, split_generation(whole, engine))
    assert [(one["text"], one["spans"]) for one in full["check"]] == [("Paris", [2])]
    assert [whole.text[one["start"] : one["end"]] for one in full["claims"]] == ["Paris", "shines"]
    assert [whole.text[one["start"] : one["end"]] for one in full["sentences"]] == ["Paris shines."]
    assert highest(full["spans"], "risk", "claim") == 0.4


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
    assert [one["text"].strip() for one in limit.risky(report()["spans"])] == risky
    assert limit.reached(report()) is bool(risky)


def test_the_default_threshold_is_that_of_the_report() -> None:
    assert [one["text"] for one in Limit(unit="claim").risky(report()["spans"], report())] == ["Seine"]
    assert Limit(unit="claim").reached(report())
    assert not Limit(unit="claim").reached(report(threshold=0.7))
    assert not Limit(unit="sentence").reached(report())
    assert Limit(unit="sentence").reached(report(threshold=0.35))


def test_marks_stand_around_claims_and_sentences() -> None:
    def marked(limit: Limit, mark: str) -> str:
        text = EditedText.of(TEXT, report())
        return text.changed(limit.mark_edits(text.spans(report()["spans"]), mark)).text

    assert marked(Limit(0.25, unit="claim"), "[[{text}|{value:.1f}]]") == "The [[Seine|0.6]] is long. It [[ends|0.3]]."
    assert marked(Limit(0.35, unit="sentence"), "<{text}>") == "<The Seine is long>. It ends."
    assert marked(Limit(0.5), "<{text}>") == "<The Seine> <is> long. It ends."


def test_errors_name_the_claim() -> None:
    error = Limit(0.5, unit="claim").error(report())
    assert isinstance(error, HallucinationRiskError)
    assert "'Seine'" in str(error)
    assert error.value == 0.6
    with pytest.raises(ConfigError, match="claim"):
        Limit(0.5, unit="clam")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="answer_risk"):
        Limit(0.5, "answer_risk", unit="claim")


def test_a_value_that_is_no_number_reaches_every_threshold() -> None:
    spans = report()["spans"]
    spans[0]["risk"] = math.nan
    for unit in ("span", "claim", "sentence"):
        assert Limit(1.0, unit=unit).reached(report(spans=spans))  # type: ignore[arg-type]
        assert highest(spans, "risk", unit) == math.inf  # type: ignore[arg-type]


def test_spans_stand_in_where_a_text_is_missing() -> None:
    """The text of a compact report's spans is lost with that of its message."""
    spans = [{key: value for key, value in span.items() if key != "text"} for span in report()["spans"]]
    assert measured_text(spans, lambda span: span["risk"]) is None
    assert Limit(0.95, unit="claim").reached(report(spans=spans))


def test_a_joint_report_has_those_of_its_answers() -> None:
    first, second = report(), risk_report(generation((" Rome", 0.7), (" is", 0.1), (" old.", 0.2)))
    shown = f"A: {TEXT}\nB: Rome is old."
    parts = parts_of(shown, [first, second], [0, 1], [0, 0])
    assert parts is not None
    joint = merged_report(parts, [first | {"source_heads": "spread"}, second | {"out_of_domain": True}])
    assert "source_heads" not in joint  # the second answer has other heads
    assert joint["out_of_domain"]
    both = [one | {"source_heads": "spread"} for one in (first, second)]
    assert merged_report(parts, both)["source_heads"] == "spread"
    TypeAdapter(RiskReport).validate_python(joint)
    assert [shown[one["start"] : one["end"]] for one in joint["check"]] == ["Rome", "Seine", "ends"]
    assert [one["text"] for one in joint["check"]] == ["Rome", "Seine", "ends"]
    assert [joint["spans"][one["spans"][0]]["risk"] for one in joint["check"]] == [0.7, 0.6, 0.3]
    claims = [(shown[one["start"] : one["end"]], one["risk"]) for one in joint["claims"]]
    assert claims == [("Seine", 0.6), ("long", 0.2), ("ends", 0.3), ("Rome", 0.7), ("old", 0.2)]
    assert [shown[one["start"] : one["end"]] for one in joint["sentences"]] == [
        "The Seine is long.",
        "It ends.",
        "Rome is old.",
    ]
