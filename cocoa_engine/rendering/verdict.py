"""What a person reads first: a verdict on the whole answer, and the claims to check."""

from __future__ import annotations

from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.scale import RAW
from cocoa_engine.rendering.wording import SOURCES
from cocoa_engine.safe_text import safe
from cocoa_engine.units import Check, Unit

CHECK_THESE = "Check these:"
NOTHING = "No claim of this answer stands out."
BAR = 10  # characters


def verdict(answer: Answer) -> str:
    """One or two sentences: the risk of the answer as a whole, or what the shading means without it."""
    if answer.answer_risk is not None:
        risk = "wrong" if answer.answer_risk != answer.answer_risk else f"{100 * answer.answer_risk:.0f} % likely wrong"
        on = "" if answer.calibrated_on is None else f"; calibrated on {_short(answer.calibrated_on)}"
        outside = answer.answer_out_of_domain and on
        unlike = " This answer is unlike those, so the probability may be unreliable." if outside else ""
        raw = SOURCES[answer.risk_source] if answer.risk_source in RAW and answer.risk_source else None
        parts = "" if raw is None else f" The risk of parts is {raw}, which is not a probability."
        return safe(f"Whole answer: {risk}{on}.{unlike}{parts}")
    if answer.risk_source is None:
        return "There is nothing to measure in this answer."
    source = SOURCES[answer.risk_source]
    if answer.risk_source in RAW:
        return f"Not calibrated: the risk is {source}, which is not a probability, so nothing is shaded."
    if answer.risk_source == "calibrator":
        return f"No risk of the answer as a whole. Shading is the {source} that a part is wrong."
    return f"Not calibrated: shading compares parts of this model's answers ({source})."


def _short(data: str) -> str:
    """A description of data without its source and licence."""
    return data.partition(" (")[0]


def describe_check(check: Check) -> str:
    """A claim to check: its text, its risk and why."""
    risk = "" if check.risk is None else f" ({check.risk:.2f})"
    reasons = f": {'; '.join(check.reasons)}" if check.reasons else ""
    return safe(f"{' '.join(check.text.split())}{risk}{reasons}".replace("\n", " "))


def bar(sentence: Unit) -> str:
    """The risk of a sentence as a bar of text."""
    filled = 0 if sentence.risk is None else round(BAR * min(max(sentence.risk, 0.0), 1.0))
    return "█" * filled + "░" * (BAR - filled)
