"""How well the risk of claims and sentences points at labelled errors; the implementation of ``cocoa claims``.

Every rule that makes the risk of a unit from its spans is measured beside the spans themselves. Two scores need no fit:
less source attention, and 1 - p of the least probable token. The third is the calibrated risk, where the engine has a
calibrator of spans. "Leads to the error" is the share of answers with an error
in which one of the three riskiest claims has a part of it, beside three claims drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from cocoa_engine.equations import improbability
from cocoa_engine.errors import DataError
from cocoa_engine.lab.data import LabelledText
from cocoa_engine.lab.forced import TeacherForced, begins_span
from cocoa_engine.lab.ranking import Bootstrap, Interval, Ranked, interval
from cocoa_engine.risk.claims import claim_ranges
from cocoa_engine.risk.sentences import sentence_ranges
from cocoa_engine.risk.units import mean_of_riskiest
from cocoa_engine.risk.words import Range

Score = Literal["source attention", "least probable token", "calibrated risk"]
SCORES: tuple[Score, ...] = ("source attention", "least probable token", "calibrated risk")
SHOWN = 3
"""The number of claims that a reader is shown."""


@dataclass(frozen=True)
class TokenValues:
    """An answer, token by token.

    Attributes:
        record: the labelled answer.
        ends: the offset after each token in the record's text.
        log_probs: log p of each token.
        source_attention: of each token; empty if it was not measured.
        starts: the numbers of the tokens at which spans begin.
        risks: the calibrated risk of each span; empty if there is none.
    """

    record: LabelledText
    ends: Sequence[int]
    log_probs: Sequence[float]
    source_attention: Sequence[float]
    starts: Sequence[int]
    risks: Sequence[float] = ()

    @classmethod
    def of(cls, forced: TeacherForced, risks: Mapping[int, float] | None = None) -> TokenValues:
        """The values of a teacher-forced answer.

        Args:
            forced: the answer.
            risks: the calibrated risk of each visible span, by its first token. See
                :func:`~cocoa_engine.lab.measured.span_risks`.
        """
        profile = forced.profile
        starts = [at for at in range(len(forced.ends)) if at == 0 or begins_span(profile, at)]
        of_spans = [] if risks is None else [risks.get(at, 0.0) for at in starts]
        return cls(forced.record, forced.ends, profile.log_probs, profile.source_attention, starts, of_spans)


class Row(NamedTuple):
    """One line of the result: a value of some units, by one rule and one score."""

    units: str
    rule: str
    score: Score | str
    items: int
    value: Interval


@dataclass
class _Column:
    """Units of one kind with the values of one rule and score."""

    groups: list[str]
    labels: list[bool]
    values: list[float]

    def add(self, group: str, label: bool, value: float) -> None:
        self.groups.append(group)
        self.labels.append(label)
        self.values.append(value)


def measure_claims(answers: Iterable[TokenValues], *, draws: int = 1000, seed: int = 0) -> list[Row]:
    """AUROC by span, claim and sentence, and how often the riskiest claims lead to the error.

    Args:
        answers: answers whose hallucinated parts are labelled; others are left out.
        draws, seed: of the bootstrap over prompts.

    Raises:
        DataError: no answer has labelled parts, or only one class is labelled.
    """
    columns: dict[tuple[str, str, Score], _Column] = {}
    hits: dict[str, _Column] = {}
    for answer in answers:
        if answer.record.spans is not None:
            _add(answer, columns, hits)
    if not columns:
        raise DataError("no answer has labelled parts, which the risk of claims is compared with.")
    rows = []
    for (units, rule, score), column in columns.items():
        positive = np.array(column.labels, dtype=float)
        if positive.min() == positive.max():  # as for the sentences of answers that are all wrong
            continue
        ranked = Ranked(column.values, positive, 1 - positive)
        found = Bootstrap(column.groups, draws, seed).interval(ranked, "auroc")
        rows.append(Row(units, rule, score, len(column.values), found))
    for name, column in hits.items():
        rows.append(Row("three claims", "lead to the error", name, len(column.values), _share(column, draws, seed)))
    return rows


def _add(answer: TokenValues, columns: dict[tuple[str, str, Score], _Column], hits: dict[str, _Column]) -> None:
    text, group = answer.record.text, answer.record.group
    wrong = answer.record.hallucinated_at(0, len(text))
    tokens = [Range(start, end) for start, end in zip([0, *answer.ends], answer.ends, strict=False)]
    firsts = list(answer.starts)
    spans = list(zip(firsts, [*firsts[1:], len(tokens)], strict=True))
    claims = [Range(one.start, one.end) for one in claim_ranges(text)]
    sentences = sentence_ranges(text)
    claim_labels = [_is_wrong(claim, text, wrong) for claim in claims]
    for score in SCORES:
        if score == "source attention" and not answer.source_attention:
            continue
        if score == "calibrated risk" and not answer.risks:
            continue
        of_tokens = [] if score == "calibrated risk" else _token_scores(answer, score)
        combine = _mean if score == "source attention" else max
        of_spans = [combine(of_tokens[first:last]) for first, last in spans] if of_tokens else list(answer.risks)
        span_ranges = [Range(tokens[first].start, tokens[last - 1].end) for first, last in spans]

        def add(units: str, rule: str, unit: Range, value: float, score: Score = score) -> None:
            column = columns.setdefault((units, rule, score), _Column([], [], []))
            column.add(group, _is_wrong(unit, text, wrong), value)

        for span, value in zip(span_ranges, of_spans, strict=True):
            if text[span.start : span.end].strip():
                add("span", "itself", span, value)
        by_claim = []
        for claim in claims:
            shared = _shared(claim, span_ranges, of_spans)
            own = _shared(claim, tokens, of_tokens) if of_tokens else []
            highest = max((value for value, _ in shared), default=math.nan)
            by_claim.append(highest)
            if shared:
                add("claim", "highest span", claim, highest)
                add("claim", "mean of spans", claim, _weighted(shared))
            if own:
                add("claim", "own tokens", claim, combine([value for value, _ in own]))
        for sentence in sentences:
            shared = _shared(sentence, span_ranges, of_spans)
            inside = [value for one, value in zip(claims, by_claim, strict=True) if _overlap(one, sentence) > 0]
            if shared and inside:
                add("sentence", "highest span", sentence, max(value for value, _ in shared))
                add("sentence", "mean of spans", sentence, _weighted(shared))
                add("sentence", "three riskiest claims", sentence, mean_of_riskiest(inside))
        if any(claim_labels) and not all(claim_labels):
            riskiest = sorted(range(len(claims)), key=lambda number: by_claim[number], reverse=True)[:SHOWN]
            found = any(claim_labels[number] for number in riskiest)
            hits.setdefault(score, _Column([], [], [])).add(group, True, float(found))
    if any(claim_labels) and not all(claim_labels):
        chance = 1 - _chance_of_none(len(claims), sum(claim_labels))
        hits.setdefault("at random", _Column([], [], [])).add(group, True, chance)


def _token_scores(answer: TokenValues, score: Score) -> list[float]:
    if score == "source attention":
        return [-value for value in answer.source_attention]
    return [improbability(value) for value in answer.log_probs]


def _is_wrong(part: Range, text: str, wrong: Sequence[bool]) -> bool:
    return any(wrong[at] and not text[at].isspace() for at in range(part.start, min(part.end, len(text))))


def _overlap(one: Range, other: Range) -> int:
    return min(one.end, other.end) - max(one.start, other.start)


def _shared(unit: Range, parts: Sequence[Range], values: Sequence[float]) -> list[tuple[float, int]]:
    """The value of each part that shares characters with a unit, and how many."""
    pairs = ((value, _overlap(part, unit)) for part, value in zip(parts, values, strict=True))
    return [(value, size) for value, size in pairs if size > 0]


def _weighted(shared: Sequence[tuple[float, int]]) -> float:
    return sum(value * size for value, size in shared) / sum(size for _, size in shared)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _chance_of_none(claims: int, wrong: int) -> float:
    """The probability that no wrong claim is among :data:`SHOWN` drawn ones."""
    shown = min(SHOWN, claims)
    return math.comb(claims - wrong, shown) / math.comb(claims, shown)


def _share(column: _Column, draws: int, seed: int) -> Interval:
    """The mean, with its interval over prompts."""
    names = list(dict.fromkeys(column.groups))
    by: dict[str, list[float]] = {name: [] for name in names}
    for group, value in zip(column.groups, column.values, strict=True):
        by[group].append(value)
    sums, counts = np.array([sum(by[name]) for name in names]), np.array([len(by[name]) for name in names])
    random = np.random.default_rng(seed)
    drawn = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    samples = (drawn @ sums) / (drawn @ counts) if len(names) > 1 else np.full(draws, np.nan)
    return interval(float(np.mean(column.values)), samples)


def to_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV: units, rule, score, items, value, low, high."""
    lines = ["units,rule,score,items,value,low,high"]
    shown: Callable[[float | None], str] = lambda value: "" if value is None else f"{value:.4f}"  # noqa: E731
    for row in rows:
        values = ",".join(map(shown, row.value))
        lines.append(f"{row.units},{row.rule},{row.score},{row.items},{values}")
    return "\n".join(lines) + "\n"


def to_markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = ["| units | rule | score | items | value |", "|---|---|---|--:|--:|"]
    lines += [f"| {row.units} | {row.rule} | {row.score} | {row.items} | {row.value.shown()} |" for row in rows]
    return "\n".join(lines) + "\n"
