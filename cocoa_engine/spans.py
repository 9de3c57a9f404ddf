"""Plain data: the spans of an answer, the candidates that competed in it, and their statistics."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

FinishReason = Literal["stop", "eos", "length", "risk"]


class Measured(BaseModel):
    """The figures shared by spans and candidates. Logarithms are natural; scores are the configured method's.

    ``log_prob`` is log p_S under ``CocoaConfig.span_log_prob`` (sum or mean over ``token_log_probs``).
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    text: str
    token_ids: list[int]
    token_log_probs: list[float] = Field(description="log p(y_i | x, y_<i) of each token, aligned with token_ids.")
    token_entropies: list[float] = Field(
        description="Entropy, in nats, of the next-token distribution each token was chosen from."
    )
    token_margins: list[float] = Field(
        description="log p of the most probable token there less that of the second; inf where only one is allowed."
    )
    log_prob: float = Field(description="log p_S.")
    con_mlds: float = Field(description="Disagreement of consecutive middle layers.")
    f_mlds: float = Field(description="Disagreement of the middle layers with the final one.")
    score: float = Field(description="What the method ranks by; higher is better.")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def self_information(self) -> float:
        """-log p_S, in nats."""
        return -self.log_prob

    @computed_field  # type: ignore[prop-decorator]
    @property
    def penalty(self) -> float:
        """log p_S - score: what the disagreement cost the span."""
        return self.log_prob - self.score


class Candidate(Measured):
    """One of the spans that competed at a risk point."""

    is_greedy: bool = Field(description="Whether greedy decoding would have taken this candidate's first token.")


class Preceding(BaseModel):
    """What stands before a span in its answer: how many tokens, and means over the last (at most 4) of them."""

    model_config = ConfigDict(frozen=True)

    tokens: int = 0
    log_prob: float = 0.0
    entropy: float = 0.0
    copied: float = Field(0.0, description="The share of tokens that the prompt holds.")
    copied_run: float = Field(0.0, description="The mean of Span.token_copied.")


class Competition(BaseModel):
    """What competed at the risk points of an answer; one that has none has the defaults."""

    model_config = ConfigDict(frozen=True)

    risk_points: int = Field(0, description="How many there are.")
    candidates: float = Field(1.0, description="Mean number of candidates.")
    score_spread: float = Field(0.0, description="Mean of their best score less the worst, by CoCoA-SIG's defaults.")
    best_score: float = Field(0.0, description="Mean of their best score.")


class Span(Measured):
    """A piece of the answer, with its risk. The texts of all spans concatenate to the answer's text."""

    start: int = Field(description="Offset of its first character in the answer's text.")
    end: int = Field(description="Offset after its last character.")
    kind: Literal["greedy", "risk_point", "given"] = Field(
        description="A run in which no token competed, the winner of a risk point, or a text scored as given."
    )
    candidates: list[Candidate] = Field(
        default_factory=list, description="At a risk point, all that competed, most probable first token first."
    )
    chosen: int | None = Field(None, description="At a risk point, the index of the kept candidate.")
    token_copied: list[int] = Field(
        default_factory=list,
        description="Of each token, how many of the answer's tokens up to it, itself included, the prompt has in a "
        "row, at most 3; 0 where the prompt does not hold the token.",
    )
    preceding: Preceding = Field(default_factory=Preceding, description="What stands before it.")
    risk: float = Field(description="In [0, 1] if calibrated, else the raw MLDS of the configured metric.")
    calibrated: bool = False
    reaches_max_risk: bool = Field(False, description="Whether the risk reaches CocoaConfig.max_risk.")


class Usage(BaseModel):
    """What a decode cost."""

    model_config = ConfigDict(frozen=True)

    prompt_tokens: int
    completion_tokens: int
    risk_points: int = Field(0, description="Steps at which more than one token competed and branches were grown.")
    cached_tokens: int = Field(0, description="Prompt tokens reused from another sequence that began alike.")
    forward_passes: int = Field(0, description="Forward passes this answer took part in, the prompt's included.")
    fed_tokens: int = Field(
        0,
        description="Tokens fed after the prompt: also those of dropped branches, a prompt read back, a masked model.",
    )

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens
