"""The words of renderings: metrics, sources of risk, verdicts and checks."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf, isnan
from typing import Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import safe
from cocoa_engine.rendering.highlights import Answer, RiskScale, visible
from cocoa_engine.risk import Check, Unit, tokens_of
from cocoa_engine.spans import RAW, Span

METRIC_NAMES = {"f_mlds": "fMLDS", "con_mlds": "ConMLDS"}
SOURCES: dict[str, str] = {
    "calibrator": "estimated probability",
    "source_attention": "how little the model looked at the source",
    "token_probability": "how unsure the model was",
    "f_mlds": "how much the layers of the model disagree",
    "con_mlds": "how much neighbouring layers of the model disagree",
}
"""What a risk is, for a reader without statistics, by ``risk_source``. The exact terms are in
``docs/explanation/risk.md``."""

FINDINGS: dict[str, tuple[str, str, str]] = {
    "source_attention": (
        "The model looked little at the source for {}.",
        "The model looked a little less at the source for {}.",
        "The model looked at the source for every part of this answer.",
    ),
    "token_probability": (
        "The model was unsure about {}.",
        "The model was a little unsure about {}.",
        "The model was fairly sure of every word.",
    ),
}
"""What to say where a part of an answer is risky, where the riskiest part is a little risky, and where nothing is
shaded or listed, by ``risk_source``."""

NOT_CALIBRATED = 'Not calibrated: no probability of an error is known until you run "cocoa calibrate".'
FINISH_REASONS = {
    "stop": "ended by a stop condition",
    "eos": "ended by the model",
    "length": "cut off by max_new_tokens",
    "risk": "stopped by max_risk",
}

REACHED = "reached max_risk"

_STATISTICS = (
    ("log_prob", "log p", ".2f"),
    ("con_mlds", "ConMLDS", ".3f"),
    ("f_mlds", "fMLDS", ".3f"),
    ("score", "score", ".2f"),
    ("probe", "probe", ".3f"),
    ("answer_probe", "answer probe", ".3f"),
    ("source_attention", "source attention", ".3f"),
    ("penalty", "penalty", ".2f"),
)
"""The statistics of a span: its field, its title and its format. Its description is that of the field."""


def words_before(text: str, offset: int, length: int = 24) -> str:
    words = safe(" ".join(text[:offset].split()))
    if len(words) <= length:
        return words
    last = words[-length:]
    return "…" + (last.partition(" ")[2] or last)


def answer_names(answers: Sequence[Answer]) -> list[str]:
    """A name for each answer: its method, and every other setting in which the answers differ."""
    configs = [answer.config for answer in answers]
    differing = [
        name
        for name in CocoaConfig.model_fields
        if name != "method" and any(getattr(config, name) != getattr(configs[0], name) for config in configs)
    ]
    return [
        ", ".join([config.method, *(f"{name} {getattr(config, name)}" for name in differing)]) for config in configs
    ]


def describe_scale(answers: Sequence[Answer], scale: RiskScale) -> str:
    """What the levels of risk are, in these answers."""
    sources = dict.fromkeys(answer.risk_source for answer in answers if answer.risk_source is not None)
    named = " and ".join(SOURCES[source] for source in sources) or "no spans"
    if not scale.absolute:
        return f"Risk by {named}, not a probability: it has no levels."
    return f"Risk, 0 to 1 ({named}):"


def describe_different_kinds(answers: Sequence[Answer]) -> str | None:
    """A warning for answers whose risks are of different kinds; `None` if they are of one kind."""
    kinds = dict.fromkeys(SOURCES[answer.risk_source] for answer in answers if answer.risk_source is not None)
    if len(kinds) < 2:
        return None
    return f"The risks of these answers are of different kinds, so do not compare them: {'; '.join(kinds)}."


def describe_answer(answer: Answer) -> str:
    """One line: the size and cost of an answer, why it ended, and its risk as a whole if there is one."""
    usage = answer.usage
    counts = (
        count(usage.completion_tokens, "token"),
        count(len(answer.spans), "span"),
        count(usage.risk_points, "risk point"),
        count(usage.forward_passes, "forward pass", "forward passes"),
    )
    reason, risk = answer.finish_reason, answer.answer_risk
    end = f", {FINISH_REASONS.get(reason, reason)}" if reason else ""
    kind = "a rank among right answers" if answer.answer_risk_source == "rank" else "calibrated"
    whole = "" if risk is None else f" Risk of the answer as a whole: {risk:.3f}, {kind}."
    return f"{answer.config.method}: {', '.join(counts)}{end}.{whole}"


def summary(answer: Answer) -> str:
    """:func:`describe_answer`, and the highest and the mean risk of the spans and their kind, on one line."""
    kind = "no spans" if answer.risk_source is None else SOURCES[answer.risk_source]
    risks = f"highest risk {answer.max_risk:.3f}, mean {answer.mean_risk:.3f} ({kind})"
    return f"{describe_answer(answer).removesuffix('.')}; {risks}."


def any_reached(answers: Iterable[Answer]) -> bool:
    """Whether any span reached ``max_risk``, so that the legend must explain its mark."""
    return any(span.reaches_max_risk for answer in answers for span in answer.spans)


def statistics(span: Span) -> list[tuple[str, str, str]]:
    """Every statistic of a span that was measured: its title, its value, and what it means."""
    what = "not measured" if span.risk_source is None else SOURCES[span.risk_source]
    rows = [("risk", "–" if span.risk is None else f"{span.risk:.3f}", what)]
    fields: dict[str, Any] = {**Span.model_fields, **Span.model_computed_fields}
    for field, title, form in _STATISTICS:
        if (value := getattr(span, field)) is not None:
            rows.append((title, format(value, form), fields[field].description or ""))
    rows.append(("tokens", str(len(span.token_ids)), ""))
    if span.token_entropies:
        mean = sum(span.token_entropies) / len(span.token_entropies)
        rows.append(("entropy", f"{mean:.2f}", "Mean over its tokens, in nats."))
    return rows


CANDIDATE_COLUMNS = ("log p", "ConMLDS", "fMLDS", "score", "taken")


def candidate_rows(span: Span) -> Iterator[tuple[bool, str, list[str]]]:
    """For each candidate of a span: whether it was kept, its text, and its values by :data:`CANDIDATE_COLUMNS`.

    The last value is ``kept``, ``greedy`` if greedy decoding would choose it, or ``both``. Of the others, ``ends``
    marks those that end the answer: a rule of ``CocoaConfig.span_log_prob`` may exclude them.
    """
    for index, candidate in enumerate(span.candidates):
        is_chosen = index == span.chosen
        taken = "greedy" if candidate.is_greedy else "ends" if candidate.ends_answer else ""
        if is_chosen:
            taken = "both" if candidate.is_greedy else "kept"
        log_prob, con, f, score = candidate.log_prob, candidate.con_mlds, candidate.f_mlds, candidate.score
        values = [f"{log_prob:.2f}", f"{con:.3f}", f"{f:.3f}", f"{score:.2f}"]
        yield is_chosen, visible(candidate.text), [*values, taken]


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, singular or plural."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


CHECK_THESE = "Check these:"
NOTHING = "No claim of this answer stands out."
QUOTED = 40  # characters
RISKY_LEVEL = 2
"""A part is risky from this level on, and a little risky below."""


def verdict(answer: Answer) -> str:
    """Two or three short sentences: the risk of the answer as a whole, or where it may be wrong without it."""
    if answer.answer_risk_source == "rank" and answer.answer_risk is not None:
        share = "" if isnan(answer.answer_risk) else f" {100 * answer.answer_risk:.0f} % of"
        whole = safe(f"Whole answer: less sure than{share} right answers ({answer.calibrated_on}).")
        if answer.answer_out_of_domain:
            whole += " It is longer than those, so this may mean little."
        return f"{whole} {finding(answer)} {NOT_CALIBRATED}"
    if answer.answer_risk is not None:
        risk = "wrong" if answer.answer_risk != answer.answer_risk else f"{100 * answer.answer_risk:.0f} % likely wrong"
        data = (answer.calibrated_on or "").partition(" (")[0]  # without its source and licence
        on = f"; calibrated on {data}" if data else ""
        outside = answer.answer_out_of_domain and on
        unlike = " This answer is unlike those, so the probability may be unreliable." if outside else ""
        raw = f" {finding(answer)}" if answer.risk_source in RAW else ""
        return safe(f"Whole answer: {risk}{on}.{unlike}") + raw
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
    if answer.risk_source in RAW:
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
    equal = [claim for claim in listed if scale.level(claim.risk) == level]
    with_word = [claim for claim in equal if word and claim.start < word.end and word.start < claim.end]
    named: Unit | None = next(iter([*with_word, *listed]), word)
    if named is None:
        return somewhere.format("a part of this answer")
    words = " ".join(named.text.split())
    return somewhere.format(safe(f'"{words}"' if len(words) <= QUOTED else f'"{words[:QUOTED]}…"'))


def _least_probable_word(answer: Answer) -> Unit | None:
    """The word of an answer's least probable token; `None` where it is in no word, or its place is not known.

    The risk of a span is that of this token. The other words of the span may be ones that the model was sure of.
    """
    span = max(answer.spans, key=lambda span: -1.0 if span.risk is None else inf if isnan(span.risk) else span.risk)
    least = min(tokens_of(span), key=lambda token: -inf if isnan(token.log_prob) else token.log_prob, default=None)
    if least is None:
        return None
    end = max(least.end, least.start + 1)  # a character of several tokens ends with the last of them
    words = [word for word in answer.words if word.start < end and word.end > least.start]
    return words[0] if len(words) == 1 else None


def risk_text(unit: Unit) -> str:
    return "–" if unit.risk is None else f"{unit.risk:.2f}"


def one_line(text: str) -> str:
    return safe(" ".join(text.split()))


def describe_check(check: Check) -> str:
    """A claim to check: its text, its risk and why."""
    risk = "" if check.risk is None else f" ({check.risk:.2f})"
    reasons = f": {'; '.join(check.reasons)}" if check.reasons else ""
    return safe(f"{' '.join(check.text.split())}{risk}{reasons}".replace("\n", " "))


def nothing_listed(answer: Answer) -> str:
    """What stands in place of the claims to check if there are none. By a raw MLDS no claim is ever listed."""
    return "" if answer.risk_source in RAW else NOTHING
