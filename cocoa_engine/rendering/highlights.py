"""Which parts of an answer are shaded: its riskiest claims, and the span at which ``max_risk`` stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cocoa_engine.rendering.differences import Range
from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.scale import RiskScale
from cocoa_engine.risk import Check

MOST_SHADED = 3
"""The number of claims that are shaded and listed."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer's text that is drawn in one style.

    Attributes:
        text: the part.
        level: the level of the shaded claim that it belongs to; 0 for the rest of the text.
        number: the number of that claim in the list of claims to check, from 0; `None` for the rest.
        first, last: whether it is the first or last piece of its claim.
        differs: whether it is in a range in which answers differ.
        reached: whether it belongs to the span that reached ``max_risk``.
    """

    text: str
    level: int = 0
    number: int | None = None
    first: bool = False
    last: bool = False
    differs: bool = False
    reached: bool = False


def pieces(answer: Answer, checks: Sequence[Check], scale: RiskScale, differing: Sequence[Range] = ()) -> list[Piece]:
    """The text of an answer in pieces, in order. Together they are the whole text.

    Args:
        answer: the answer.
        checks: the claims to check. Those of level 1 and above are shaded.
        scale: the levels.
        differing: ranges of the text in which the answer differs from another.
    """
    shaded = [(one, number) for number, one in enumerate(checks) if scale.level(one.risk)]
    reached = [(span.start, span.end) for span in answer.spans if span.reaches_max_risk]
    bounds = {0, len(answer.text), *(at for part in (*differing, *reached) for at in part)}
    bounds |= {at for one, _ in shaded for at in (one.start, one.end)}
    ordered = sorted(bounds)
    found = []
    for start, end in pairwise(ordered):
        claim = next(((one, number) for one, number in shaded if one.start <= start < one.end), None)
        found.append(
            Piece(
                answer.text[start:end],
                level=0 if claim is None else scale.level(claim[0].risk),
                number=None if claim is None else claim[1],
                first=claim is not None and claim[0].start == start,
                last=claim is not None and claim[0].end == end,
                differs=any(low <= start < high for low, high in differing),
                reached=any(low <= start < high for low, high in reached),
            )
        )
    return found


def stopped_without_text(answer: Answer) -> str | None:
    """The text of the span at which ``max_risk`` stopped, if it has no visible text; otherwise `None`."""
    last = answer.spans[-1] if answer.spans else None
    return last.text if last is not None and last.reaches_max_risk and not last.text.strip() else None
