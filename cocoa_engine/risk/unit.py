"""Plain data: a part of an answer that a person reads, with its risk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from pydantic import ConfigDict, Field

from cocoa_engine.arguments import ResultModel
from cocoa_engine.spans import RiskSource

UnitLevel = Literal["span", "claim", "sentence"]
"""The parts of an answer that a threshold can apply to."""

NOT_IN_SOURCE = "not in the source"
LITTLE_ATTENTION = "little attention to the source"
UNSURE = "the model was unsure"
COMPETING = "competing"
DISAGREE = "samples disagree"


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


class Rival(Protocol):
    """A candidate that competed in a span; :class:`~cocoa_engine.spans.Candidate` is one."""

    @property
    def text(self) -> str: ...


class Part(Protocol):
    """A span of an answer, as far as units need it; :class:`~cocoa_engine.spans.Span` is one.

    Lists have one value per token, and are empty if it was not measured.
    """

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def risk(self) -> float | None: ...

    @property
    def risk_source(self) -> RiskSource | None: ...

    @property
    def flagged(self) -> bool: ...

    @property
    def token_ends(self) -> Sequence[int]: ...

    @property
    def token_log_probs(self) -> Sequence[float]: ...

    @property
    def token_source_attention(self) -> Sequence[float]: ...

    @property
    def token_copied(self) -> Sequence[int]: ...

    @property
    def candidates(self) -> Sequence[Rival]: ...

    @property
    def chosen(self) -> int | None: ...
