"""The words, claims and sentences of an answer, with the risk of each from the spans that it overlaps.

Rules, as measured on labelled answers by ``cocoa claims``: the risk of a word or a claim is the highest of its spans;
the risk of a sentence is the mean of its three riskiest claims. The highest span alone, and the mean of all spans, each
rank sentences worse on one of the data sets. A sentence without claims, or with a span whose risk is not a finite
number, has the highest risk of its spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, log
from statistics import median
from typing import Literal

from cocoa_engine.equations import improbability
from cocoa_engine.risk.claims import ClaimKind, ClaimRange, claim_ranges
from cocoa_engine.risk.competing import competing
from cocoa_engine.risk.sentences import sentence_ranges
from cocoa_engine.risk.unit import COMPETING, LITTLE_ATTENTION, NOT_IN_SOURCE, UNSURE, Check, Part, Unit
from cocoa_engine.risk.words import word_ranges
from cocoa_engine.spans import RAW

LOW_ATTENTION = 0.8
"""Attention to the source is low below this share of the median of the answer's claims."""

LOW_PROBABILITY = 0.5
"""The model was unsure of a token with a lower probability."""

LOWEST_SHADE = 0.25
"""The risk from which a claim is shaded, and listed among those to check, unless the risk is a raw MLDS."""

SMALLEST_DIFFERENCE = 0.001
RISKIEST = 3
"""The number of claims whose mean risk is that of their sentence."""


@dataclass(frozen=True)
class Token:
    """A token of the answer: its offsets, log p, and its source attention and copied run if they were measured."""

    start: int
    end: int
    log_prob: float
    source_attention: float | None
    copied: int | None


class MeasuredText:
    """An answer whose words, claims and sentences are asked for.

    Args:
        text: the text of the answer.
        parts: its spans, in order.
        begin: the offset at which the answer begins, after any reasoning. Units before it are left out.
        offset: the offset of the first character of ``text`` in the text that the spans' offsets refer to. The units
            have offsets in that text, too.
        has_source: whether the prompt holds a passage. Little attention to it is a reason only then.
    """

    def __init__(
        self, text: str, parts: Sequence[Part], *, begin: int = 0, offset: int = 0, has_source: bool = True
    ) -> None:
        self._text, self._parts, self._offset, self._has_source = text, parts, offset, has_source
        self._skipped = max(begin - offset, 0)

    @cached_property
    def words(self) -> list[Unit]:
        """The words. Those of a script that is written without spaces are the tokens."""
        return [self._unit(*word, "word") for word in word_ranges(self._answer, self._cuts)]

    @cached_property
    def claims(self) -> list[Unit]:
        """The names, numbers, dates, short quotations and content words."""
        return [self._unit(one.start, one.end, one.kind) for one in self._claim_ranges]

    @cached_property
    def sentences(self) -> list[Unit]:
        """The sentences."""
        return [self._sentence(*sentence) for sentence in sentence_ranges(self._answer)]

    def compared(self, level: Literal["claim", "sentence"]) -> list[Unit]:
        """The claims or sentences, as a threshold is compared with them.

        In an answer without claims, its sentences take their place, so that it does not pass unseen. A span that is in
        no claim, such as punctuation, is added if its risk is not a finite number.

        Args:
            level: ``claim`` or ``sentence``.
        """
        if level == "sentence" or not self.claims:
            return self.sentences
        within = {number for claim in self.claims for number in claim.spans}
        shift = self._offset + self._skipped
        broken = [
            self._unit(max(part.start - shift, 0), part.end - shift, "word")
            for number, part in enumerate(self._parts)
            if number not in within and self._is_visible(part) and not isfinite(part.risk or 0.0)
        ]
        return sorted([*self.claims, *broken], key=lambda unit: unit.start) if broken else self.claims

    def check_these(self, most: int = 3) -> list[Check]:
        """The riskiest claims, riskiest first.

        A claim is left out if its risk is below the lowest shade and below the default threshold of its source, or as
        low as the lowest of the answer. A raw MLDS has neither, so that no claim is listed by it.

        Of claims with the same risk, such as claims of the same span, the one with less attention to the source comes
        first, or else the one with the less probable token.

        Args:
            most: the largest number of claims.

        Raises:
            ValueError: ``most`` is negative.
        """
        if most < 0:
            raise ValueError(f"check_these takes a number of claims, 0 or more, not {most}")
        claims = [(self._order(claim), claim) for claim in self.claims if claim.risk is not None]
        if len(claims) == 1 and not claims[0][1].reasons:
            return []
        if len(claims) > 1:
            lowest = min(order for order, _ in claims)
            claims = [(order, claim) for order, claim in claims if _is_above(order, lowest)]
        claims = [(order, claim) for order, claim in claims if self._stands_out(claim)]
        ranked = sorted(claims, key=lambda one: one[0], reverse=True)[:most]  # stable: ties in order of the text
        return [
            Check(**claim.__dict__, competing=competing(self._text, self._parts, claim, self._offset))
            for _, claim in ranked
        ]

    @property
    def _answer(self) -> str:
        return self._text[self._skipped :]

    @cached_property
    def _cuts(self) -> list[int]:
        """Where tokens end in the answer; where spans end if tokens are not known."""
        ends = (end for part in self._parts for end in (part.token_ends or (part.end,)))
        return [end - self._offset - self._skipped for end in ends]

    @cached_property
    def _claim_ranges(self) -> list[ClaimRange]:
        return claim_ranges(self._answer, self._cuts)

    @cached_property
    def _tokens(self) -> list[list[Token]]:
        """The tokens of each span with text of their own; none for spans whose tokens' ends are not known."""
        return [tokens_of(part) for part in self._parts]

    def _is_visible(self, part: Part) -> bool:
        """Whether a span has text of the answer that is not white space."""
        start = max(part.start - self._offset, self._skipped)
        return bool(self._text[start : part.end - self._offset].strip())

    def _stands_out(self, claim: Unit) -> bool:
        """Whether one of the spans of a claim has a risk that is shaded, flagged, or not a finite number."""
        parts = [part for part in map(self._parts.__getitem__, claim.spans) if part.risk is not None]
        return any(
            part.flagged
            or not isfinite(part.risk or 0.0)
            or ((part.risk or 0.0) >= LOWEST_SHADE and part.risk_source not in RAW)
            for part in parts
            if self._is_visible(part)
        )

    def _sentence(self, start: int, end: int) -> Unit:
        unit = self._unit(start, end, "sentence")
        if not isfinite(unit.risk or 0.0):
            return unit
        inside = [one.risk for one in self.claims if unit.start <= one.start < unit.end and one.risk is not None]
        return unit.model_copy(update={"risk": mean_of_riskiest(inside)}) if inside else unit

    def _unit(self, start: int, end: int, kind: ClaimKind | Literal["sentence"]) -> Unit:
        start, end = start + self._skipped, end + self._skipped
        text = self._text[start:end]
        start, end = start + self._offset, end + self._offset
        numbers = self._numbers(start, end)
        risk = riskiest([part.risk for part in map(self._parts.__getitem__, numbers) if self._is_visible(part)])
        unit = Unit(text=text, start=start, end=end, kind=kind, risk=risk, spans=numbers)
        return unit if kind == "sentence" else unit.model_copy(update={"reasons": self._reasons(unit)})

    def _own_tokens(self, start: int, end: int, numbers: Iterable[int]) -> list[Token]:
        """The tokens of some spans that share a character with a range of the text."""
        tokens = (token for number in numbers for token in self._tokens[number])
        return [token for token in tokens if token.start < end and token.end > start]

    def _reasons(self, unit: Unit) -> list[str]:
        tokens = self._own_tokens(unit.start, unit.end, unit.spans)
        reasons = []
        attention = _attention(tokens)
        if self._has_source and attention is not None and attention < LOW_ATTENTION * self._usual_attention:
            reasons.append(LITTLE_ATTENTION if _is_copied(tokens) else NOT_IN_SOURCE)
        if tokens and min(token.log_prob for token in tokens) < log(LOW_PROBABILITY):
            reasons.append(UNSURE)
        if others := competing(self._text, self._parts, unit, self._offset):
            reasons.append(f"{COMPETING}: {', '.join(others)}")
        return reasons

    @cached_property
    def _usual_attention(self) -> float:
        """The median attention to the source of the answer's claims; 0 if it was not measured."""
        shift = self._skipped + self._offset
        ranges = [(one.start + shift, one.end + shift) for one in self._claim_ranges]
        measured = [_attention(self._own_tokens(*claim, self._numbers(*claim))) for claim in ranges]
        found = [attention for attention in measured if attention is not None]
        return median(found) if found else 0.0

    def _numbers(self, start: int, end: int) -> list[int]:
        """The numbers of the spans that share a character with a range of the text."""
        return [number for number, part in enumerate(self._parts) if part.start < end and part.end > start]

    def _order(self, claim: Unit) -> tuple[float, float]:
        """What claims are ranked by: the risk, then the claim's own tokens."""
        tokens = self._own_tokens(claim.start, claim.end, claim.spans)
        attention = _attention(tokens)
        if attention is not None:
            return _rank(claim.risk or 0.0), -attention
        return _rank(claim.risk or 0.0), improbability(min((token.log_prob for token in tokens), default=0.0))


def riskiest(risks: Iterable[float | None]) -> float | None:
    """The highest risk; `None` if there is none. A risk that is not a finite number is the highest."""
    known = [risk for risk in risks if risk is not None]
    return max(known, key=_rank) if known else None


def mean_of_riskiest(risks: Iterable[float]) -> float:
    """The mean of the three highest of some risks, or of fewer if there are fewer; at least one is needed."""
    highest = sorted(risks, key=_rank, reverse=True)[:RISKIEST]
    return sum(highest) / len(highest)


def _rank(risk: float) -> float:
    return risk if isfinite(risk) else inf


def _is_above(order: tuple[float, float], lowest: tuple[float, float]) -> bool:
    return any(one - other >= SMALLEST_DIFFERENCE for one, other in zip(order, lowest, strict=True))


def tokens_of(part: Part) -> list[Token]:
    """The tokens of a span. Without their ends, each counts for the whole span."""
    count = len(part.token_log_probs)
    ends = part.token_ends
    known = len(ends) == count
    starts = [part.start, *ends][:count] if known else [part.start] * count
    source = part.token_source_attention if len(part.token_source_attention) == count else [None] * count
    copied = part.token_copied if len(part.token_copied) == count else [None] * count
    columns = (starts, ends if known else [part.end] * count, part.token_log_probs, source, copied)
    return [Token(*values) for values in zip(*columns, strict=True)]


def _attention(tokens: Sequence[Token]) -> float | None:
    """The mean source attention of some tokens; `None` if it was not measured."""
    values = [token.source_attention for token in tokens if token.source_attention is not None]
    return sum(values) / len(values) if values else None


def _is_copied(tokens: Sequence[Token]) -> bool:
    """Whether the tokens occur in the prompt in this order, as far as runs are counted."""
    runs = [token.copied or 0 for token in tokens]
    return all(run >= min(number + 1, 3) for number, run in enumerate(runs)) if runs else False
