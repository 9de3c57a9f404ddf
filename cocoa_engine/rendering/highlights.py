"""The parts of an answer to highlight, by the risk scale and by differences between answers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby, pairwise
from typing import Protocol

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import safe
from cocoa_engine.risk import LOWEST_SHADE, Check, Unit
from cocoa_engine.risk.features import AnswerStatistics
from cocoa_engine.spans import RAW, AnswerRiskSource, RiskSource, Span


class Answer(AnswerStatistics, Protocol):
    """An answer with its spans, such as :class:`~cocoa_engine.results.Generation`, which calls the renderers."""

    @property
    def text(self) -> str: ...

    @property
    def config(self) -> CocoaConfig: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def model_name(self) -> str | None: ...

    @property
    def answer_risk_source(self) -> AnswerRiskSource | None: ...

    @property
    def risk_source(self) -> RiskSource | None: ...

    @property
    def calibrated_on(self) -> str | None: ...

    @property
    def answer_out_of_domain(self) -> bool: ...

    @property
    def words(self) -> Sequence[Unit]: ...

    @property
    def sentences(self) -> Sequence[Unit]: ...

    def check_these(self, most: int = 3) -> Sequence[Check]: ...

    @property
    def max_risk(self) -> float: ...

    @property
    def mean_risk(self) -> float: ...

    def model_dump_json(self) -> str: ...


BOUNDS = (0.0, LOWEST_SHADE, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class RiskScale:
    """Maps a risk to the level, 0 to 3, that it is drawn at; a raw MLDS is not ``absolute`` and has no levels."""

    absolute: bool = True

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "RiskScale":
        """The scale of some spans; without levels if any risk is a raw MLDS."""
        return cls(not any(span.risk_source in RAW for span in spans))

    @property
    def ranges(self) -> list[str]:
        """The range of each level as text; no ranges without levels."""
        return [f"{low:.2f}–{high:.2f}" for low, high in pairwise(BOUNDS)] if self.absolute else []

    def level(self, risk: float | None) -> int:
        """The level of a risk; 0 if it was not measured, or there are no levels. NaN has the highest level."""
        if risk is None or not self.absolute:
            return 0
        return sum(not risk < bound for bound in BOUNDS[1:-1])


# words; in scripts that are written without spaces, and for punctuation, each character by itself
_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")

Range = tuple[int, int]


def differences(texts: Sequence[str]) -> list[list[Range]]:
    """The ranges of characters, by text, in which the first text and each of the others differ.

    White space alone is no difference. Neighbouring words form one range.
    """
    words = [list(_WORD.finditer(text)) for text in texts]
    differing: list[set[int]] = [set() for _ in texts]
    for number in range(1, len(texts)):
        first, other = ([word.group() for word in words[index]] for index in (0, number))
        matcher = SequenceMatcher(a=first, b=other, autojunk=False)
        for tag, start, end, other_start, other_end in matcher.get_opcodes():
            if tag != "equal":
                differing[0].update(range(start, end))
                differing[number].update(range(other_start, other_end))
    ranges: list[list[Range]] = []
    for matches, numbers in zip(words, differing, strict=True):
        ranges.append([])
        for number in sorted(numbers):
            start, end = matches[number].span()
            if number - 1 in numbers:
                start, _ = ranges[-1].pop()
            ranges[-1].append((start, end))
    return ranges


MOST_SHADED = 3
"""The number of claims that are shaded and listed."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer's text that is drawn in one style.

    Attributes:
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

    The checks of level 1 and above are shaded. If the span that reached ``max_risk`` has no text, the last piece is
    empty and stands for it.
    """
    shaded = [(number, check) for number, check in enumerate(checks) if scale.level(check.risk)]
    reached = [(span.start, span.end) for span in answer.spans if span.reaches_max_risk]
    bounds = {0, len(answer.text), *(at for part in (*differing, *reached) for at in part)}
    bounds |= {at for _, check in shaded for at in (check.start, check.end)}
    parts = []
    for start, end in pairwise(sorted(bounds)):
        number, claim = next(((n, check) for n, check in shaded if check.start <= start < check.end), (None, None))
        parts.append(
            Piece(
                answer.text[start:end],
                level=0 if claim is None else scale.level(claim.risk),
                number=number,
                first=claim is not None and claim.start == start,
                last=claim is not None and claim.end == end,
                differs=any(low <= start < high for low, high in differing),
                reached=any(low <= start < high for low, high in reached),
            )
        )
    if reached and reached[-1][0] == reached[-1][1]:
        parts.append(Piece("", reached=True))
    return parts


def visible(text: str) -> str:
    """A span's text on one line, with visible line ends and visible spaces at both ends."""
    text = safe(text).replace("\n", "\\n").replace("\t", "\\t")
    core = text.strip(" ")
    before = len(text) - len(text.lstrip(" ")) if core else len(text)
    return "␣" * before + core + "␣" * (len(text) - before - len(core)) or "(end)"


def split_whitespace(text: str) -> tuple[str, str, str]:
    """The white space before a text, the text itself, and the white space after it. Only the text is marked."""
    core = text.strip()
    start = text.index(core) if core else len(text)
    return text[:start], core, text[start + len(core) :]


def marked(parts: Iterable[Piece]) -> str:
    """The pieces of an answer with risk in brackets, ``[like this|2]``, and differences in braces.

    Both nest: braces are around the brackets if all text in the brackets differs, otherwise inside. The span that
    reached ``max_risk`` has ``!`` after its level; if it has no visible text, a sign stands for it.
    """

    def in_braces(piece: Piece) -> str:
        before, core, after = split_whitespace(safe(piece.text))
        return f"{before}{{{core}}}{after}" if piece.differs and core else before + core + after

    text = []
    for _, group in groupby(parts, key=lambda piece: (piece.number, piece.number is None and piece.reached)):
        run = list(group)
        shown = [piece for piece in run if safe(piece.text).strip()]
        reached = any(piece.reached for piece in shown or run)
        risk = f"{run[0].level}!" if reached else str(run[0].level or "")
        all_differ = bool(risk and shown) and all(piece.differs for piece in shown)
        written = "".join(safe(piece.text) if all_differ else in_braces(piece) for piece in run)
        before, core, after = split_whitespace(written)
        core = core or (visible(written) if reached else "")
        if core and risk:
            core = f"{{[{core}|{risk}]}}" if all_differ else f"[{core}|{risk}]"
        text += [before, core, after]
    return "".join(text)
