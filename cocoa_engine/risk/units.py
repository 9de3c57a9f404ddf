"""Words, claims and sentences with their risk: what a person reads of an answer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from math import inf, isfinite, log
from operator import itemgetter
from statistics import median
from typing import Literal

from pydantic import ConfigDict, Field

from cocoa_engine.arguments import ResultModel
from cocoa_engine.equations import improbability
from cocoa_engine.risk.claims import ClaimKind, ClaimRange, claim_ranges
from cocoa_engine.risk.sentences import sentence_ranges
from cocoa_engine.risk.words import Range, word_ranges
from cocoa_engine.spans import RAW, Span

UnitLevel = Literal["span", "claim", "sentence"]
"""The parts of an answer that a threshold can apply to."""

NOT_IN_SOURCE = "not in the source"
LITTLE_ATTENTION = "little attention to the source"
UNSURE = "the model was unsure"
COMPETING = "competing"
DISAGREE = "samples disagree"

LOW_ATTENTION = 0.8  # of the median attention to the source of the answer's claims
LOW_PROBABILITY = 0.5  # of a token that the model was unsure of
LOWEST_SHADE = 0.25
"""The risk from which a claim is shaded, and listed among those to check, unless the risk is a raw MLDS."""
SMALLEST_DIFFERENCE = 0.001
RISKIEST = 3  # claims, whose mean risk is that of their sentence
MOST_RIVALS = 3


class Unit(ResultModel):
    """A word, a claim or a sentence of an answer."""

    model_config = ConfigDict(frozen=True)

    text: str
    start: int = Field(description="Offset of its first character in the answer's text.")
    end: int = Field(description="Offset after its last character.")
    kind: Literal["word", "name", "number", "date", "quote", "sentence"] = "word"
    risk: float | None = Field(description="Risk of the unit, on the scale of the spans. `None` if they have none.")
    reasons: list[str] = Field(
        default_factory=list,
        description="Why it may be wrong: `not in the source` (little attention to the prompt, and its words are not "
        "there), `little attention to the source` (its words are there), both only where the prompt may hold a "
        "passage; `the model was unsure` (a token has a "
        "probability below 0.5), `competing: ...` (what other candidates say instead); from "
        ":meth:`.Consistency.check_these` also `samples disagree` (its words are, on average, in less than half of the "
        "samples).",
    )
    spans: list[int] = Field(default_factory=list, description="Numbers of the spans that share a character with it.")


class Check(Unit):
    """A claim that is worth checking first."""

    competing: list[str] = Field(
        default_factory=list, description="What the other candidates of its spans say in its place, likeliest first."
    )


def competing(text: str, parts: Sequence[Span], claim: Unit, offset: int = 0) -> list[str]:
    """What other candidates say in place of a claim, in their order, each text once. One that is cut ends in ``…``."""
    texts: list[str] = []
    for number in claim.spans:
        part = parts[number]
        begin = min(claim.start, part.start)
        before = text[begin - offset : part.start - offset]
        own = before + text[part.start - offset : part.end - offset]
        claimed = Range(claim.start - begin, min(claim.end, part.end) - begin)
        for index, rival in enumerate(part.candidates):
            if index != part.chosen:
                texts += _counterpart(own, before + rival.text, claimed)
    return list(dict.fromkeys(texts))[:MOST_RIVALS]


def _counterpart(own: str, other: str, claimed: Range) -> Iterator[str]:
    """The words of ``other`` that stand for the range ``claimed`` of ``own``, if they differ."""
    words, others = word_ranges(own), word_ranges(other)
    inside = [number for number, word in enumerate(words) if word.start < claimed.end and word.end > claimed.start]
    if not inside:
        return
    first, last = inside[0], inside[-1] + 1
    texts = ([own[word.start : word.end] for word in words], [other[word.start : word.end] for word in others])
    matcher = SequenceMatcher(None, *texts, autojunk=False)
    low, high, differs = len(others), 0, False
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if start >= last or end <= first:
            continue
        if tag == "equal":  # the part of the match inside the claim, at the same distance
            other_start, other_end = other_start + max(first - start, 0), other_end - max(end - last, 0)
        elif tag == "replace":
            differs = True
            if end > last:  # the claim is the beginning of what was replaced
                other_end = min(other_end, other_start + max(last - start, 1))
            if start < first:
                other_start = min(other_start + first - start, other_end)
        else:
            continue
        low, high = min(low, other_start), max(high, other_end)
    if differs and low < high:
        cut = others[high - 1].end == len(other)
        yield other[others[low].start : others[high - 1].end] + ("…" if cut else "")


@dataclass(frozen=True)
class Token:
    """A token of the answer: its offsets, log p, and its source attention and copied run if they were measured."""

    start: int
    end: int
    log_prob: float
    source_attention: float | None
    copied: int | None


def tokens_of(part: Span) -> list[Token]:
    """The tokens of a span. Without their ends, each counts for the whole span."""
    count, ends = len(part.token_log_probs), part.token_ends
    has_ends = len(ends) == count
    columns = (
        [part.start, *ends][:count] if has_ends else [part.start] * count,
        ends if has_ends else [part.end] * count,
        part.token_log_probs,
        *(
            values if len(values) == count else [None] * count
            for values in (part.token_source_attention, part.token_copied)
        ),
    )
    return [Token(*values) for values in zip(*columns, strict=True)]


def riskiest(risks: Iterable[float | None]) -> float | None:
    """The highest risk; `None` if there is none. A risk that is not a finite number is the highest."""
    return max((risk for risk in risks if risk is not None), key=_rank, default=None)


def _rank(risk: float) -> float:
    return risk if isfinite(risk) else inf


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
        self, text: str, parts: Sequence[Span], *, begin: int = 0, offset: int = 0, has_source: bool = True
    ) -> None:
        self._text, self._parts, self._offset, self._has_source = text, parts, offset, has_source
        self._begin = begin = max(begin, offset)
        self._answer = answer = text[begin - offset :]
        # where tokens end in the answer; where spans end if tokens are not known
        self._cuts = [end - begin for part in parts for end in part.token_ends or (part.end,)]
        self._visible = {
            number
            for number, part in enumerate(parts)
            if part.end > begin and answer[max(part.start - begin, 0) : part.end - begin].strip()
        }

    @cached_property
    def words(self) -> list[Unit]:
        """The words. Those of a script that is written without spaces are the tokens."""
        return [self._unit(*word, "word") for word in word_ranges(self._answer, self._cuts)]

    @cached_property
    def claims(self) -> list[Unit]:
        """The names, numbers, dates, short quotations and content words."""
        return [self._unit(claim.start, claim.end, claim.kind) for claim in self._claim_ranges]

    @cached_property
    def sentences(self) -> list[Unit]:
        """The sentences."""
        units = []
        for sentence in sentence_ranges(self._answer):
            unit = self._unit(*sentence, "sentence")
            inside = [claim.risk for claim in self.claims if unit.start <= claim.start < unit.end]
            risks = sorted((risk for risk in inside if risk is not None), key=_rank, reverse=True)[:RISKIEST]
            if risks and isfinite(unit.risk or 0.0):
                unit = unit.model_copy(update={"risk": sum(risks) / len(risks)})
            units.append(unit)
        return units

    def compared(self, level: Literal["claim", "sentence"]) -> list[Unit]:
        """The claims or sentences, as a threshold is compared with them.

        In an answer without claims, its sentences take their place, so that it does not pass unseen. A span that is in
        no claim, such as punctuation, is added if its risk is not a finite number.
        """
        if level == "sentence" or not self.claims:
            return self.sentences
        outside = self._visible.difference(*(claim.spans for claim in self.claims))
        broken = [
            self._unit(max(part.start - self._begin, 0), part.end - self._begin, "word")
            for number, part in enumerate(self._parts)
            if number in outside and not isfinite(part.risk or 0.0)
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
        listed = [(order, claim) for order, claim in claims if any(map(self._stands_out, claim.spans))]
        ranked = sorted(listed, key=itemgetter(0), reverse=True)[:most]  # stable: ties in order of the text
        return [
            Check(**claim.__dict__, competing=competing(self._text, self._parts, claim, self._offset))
            for _, claim in ranked
        ]

    @cached_property
    def _claim_ranges(self) -> list[ClaimRange]:
        return claim_ranges(self._answer, self._cuts)

    def _stands_out(self, number: int) -> bool:
        """Whether a span has a risk that is shaded, flagged, or not a finite number."""
        part = self._parts[number]
        if part.risk is None or number not in self._visible:
            return False
        return part.flagged or not isfinite(part.risk) or (part.risk >= LOWEST_SHADE and part.risk_source not in RAW)

    def _unit(self, start: int, end: int, kind: ClaimKind | Literal["sentence"]) -> Unit:
        text = self._answer[start:end]
        start, end = start + self._begin, end + self._begin
        numbers = self._numbers(start, end)
        risk = riskiest(self._parts[number].risk for number in numbers if number in self._visible)
        unit = Unit(text=text, start=start, end=end, kind=kind, risk=risk, spans=numbers)
        return unit if kind == "sentence" else unit.model_copy(update={"reasons": self._reasons(unit)})

    def _reasons(self, unit: Unit) -> list[str]:
        tokens = self._tokens_in(unit.start, unit.end)
        reasons = []
        attention = _attention(tokens)
        if self._has_source and attention is not None and attention < LOW_ATTENTION * self._usual_attention:
            # its tokens occur in the prompt in this order, as far as runs are counted
            copied = all((token.copied or 0) >= min(number + 1, 3) for number, token in enumerate(tokens))
            reasons.append(LITTLE_ATTENTION if copied else NOT_IN_SOURCE)
        if tokens and min(token.log_prob for token in tokens) < log(LOW_PROBABILITY):
            reasons.append(UNSURE)
        if others := competing(self._text, self._parts, unit, self._offset):
            reasons.append(f"{COMPETING}: {', '.join(others)}")
        return reasons

    @cached_property
    def _usual_attention(self) -> float:
        """The median attention to the source of the answer's claims; 0 if it was not measured."""
        ranges = [(claim.start + self._begin, claim.end + self._begin) for claim in self._claim_ranges]
        measured = [_attention(self._tokens_in(*claim)) for claim in ranges]
        return median([attention for attention in measured if attention is not None] or [0.0])

    def _numbers(self, start: int, end: int) -> list[int]:
        """The numbers of the spans that share a character with a range of the text."""
        return [number for number, part in enumerate(self._parts) if part.start < end and part.end > start]

    @cached_property
    def _tokens(self) -> list[list[Token]]:
        return [tokens_of(part) for part in self._parts]

    def _tokens_in(self, start: int, end: int) -> list[Token]:
        """The tokens that share a character with a range of the text."""
        tokens = (token for number in self._numbers(start, end) for token in self._tokens[number])
        return [token for token in tokens if token.start < end and token.end > start]

    def _order(self, claim: Unit) -> tuple[float, float]:
        """What claims are ranked by: the risk, then the claim's own tokens."""
        tokens = self._tokens_in(claim.start, claim.end)
        attention = _attention(tokens)
        if attention is None:
            attention = -improbability(min((token.log_prob for token in tokens), default=0.0))
        return _rank(claim.risk or 0.0), -attention


def _is_above(order: tuple[float, float], lowest: tuple[float, float]) -> bool:
    return any(value - least >= SMALLEST_DIFFERENCE for value, least in zip(order, lowest, strict=True))


def _attention(tokens: Sequence[Token]) -> float | None:
    """The mean source attention of some tokens; `None` if it was not measured."""
    values = [token.source_attention for token in tokens if token.source_attention is not None]
    return sum(values) / len(values) if values else None
