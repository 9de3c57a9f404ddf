"""What a person reads first: a verdict on the whole answer, and the claims to check."""

from __future__ import annotations

from math import inf, isnan

from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.scale import RAW, RiskScale
from cocoa_engine.rendering.wording import FINDINGS, NOT_CALIBRATED, SOURCES
from cocoa_engine.risk import Check, Unit, tokens_of
from cocoa_engine.safe_text import safe

CHECK_THESE = "Check these:"
NOTHING = "No claim of this answer stands out."
BAR = 10  # characters
QUOTED = 40  # characters
RISKY_LEVEL = 2
"""A part is risky from this level on, and a little risky below: the model found other words likelier, or attended less
to the source than at half of its own spans."""


def verdict(answer: Answer) -> str:
    """Two or three short sentences: the risk of the answer as a whole, or where it may be wrong without it."""
    if answer.answer_risk is not None:
        risk = "wrong" if answer.answer_risk != answer.answer_risk else f"{100 * answer.answer_risk:.0f} % likely wrong"
        on = "" if answer.calibrated_on is None else f"; calibrated on {_short(answer.calibrated_on)}"
        outside = answer.answer_out_of_domain and on
        unlike = " This answer is unlike those, so the probability may be unreliable." if outside else ""
        return " ".join([safe(f"Whole answer: {risk}{on}.{unlike}"), *([finding(answer)] if _is_raw(answer) else [])])
    if answer.risk_source == "calibrator" or answer.risk_source is None:
        return finding(answer)
    return f"{finding(answer)} {NOT_CALIBRATED}"


def finding(answer: Answer) -> str:
    """What was measured of the parts of an answer, in words of everyday life."""
    if answer.risk_source is None:
        return "There is nothing to measure in this answer."
    if answer.risk_source == "calibrator":
        parts = f"The risk of a part is the {SOURCES['calibrator']} that it is wrong."
        return f"The risk of the answer as a whole was not measured. {parts}"
    if _is_raw(answer):
        return f"The numbers say {SOURCES[answer.risk_source]}; they are not probabilities, so nothing is shaded."
    risky, little, nowhere = FINDINGS[answer.risk_source]
    listed = answer.check_these()
    scale = RiskScale.of(answer.spans)
    level = scale.level(listed[0].risk if listed else answer.max_risk)
    if not level and not listed:
        return nowhere
    somewhere = risky if level >= RISKY_LEVEL else little
    word = _least_probable_word(answer) if answer.risk_source == "token_probability" else None
    # a claim that is listed below, and of equal ones that with the word
    equal = [one for one in listed if scale.level(one.risk) == level]
    with_word = [one for one in equal if word and one.start < word.end and word.start < one.end]
    named: Unit | None = next(iter([*with_word, *listed]), word)
    if named is None:
        return somewhere.format("a part of this answer")
    words = " ".join(named.text.split())
    return somewhere.format(safe(f'"{words}"' if len(words) <= QUOTED else f'"{words[:QUOTED]}…"'))


def _least_probable_word(answer: Answer) -> Unit | None:
    """The word of an answer's least probable token; `None` where it is in no word, or its place is not known.

    The risk of a span is that of this token. The other words of the span may be ones that the model was sure of.
    """
    span = max(answer.spans, key=lambda one: -1.0 if one.risk is None else inf if isnan(one.risk) else one.risk)
    least = min(tokens_of(span), key=lambda one: -inf if isnan(one.log_prob) else one.log_prob, default=None)
    if least is None:
        return None
    end = max(least.end, least.start + 1)  # a character of several tokens ends with the last of them
    found = [word for word in answer.words if word.start < end and word.end > least.start]
    return found[0] if len(found) == 1 else None


def _is_raw(answer: Answer) -> bool:
    return answer.risk_source in RAW


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
