"""Plain data: the spans of an answer, the candidates that competed in it, and their statistics."""

from typing import Literal

from pydantic import ConfigDict, Field, computed_field

from cocoa_engine.arguments import ResultModel

FinishReason = Literal["stop", "eos", "length", "risk"]

AnswerRiskSource = Literal["calibrator", "rank"]
RiskSource = Literal["calibrator", "source_attention", "token_probability", "f_mlds", "con_mlds"]
"""The value that a risk was computed from. The first three lie in [0, 1], the raw MLDS in [0, 2]."""

RAW: tuple[RiskSource, ...] = ("f_mlds", "con_mlds")
"""The sources whose range depends on the model: their risks have neither levels nor a default threshold."""


class Measured(ResultModel):
    """The statistics that spans and candidates share. Logarithms are natural; scores are those of the method.

    ``log_prob`` is log p_S by ``CocoaConfig.span_log_prob``, by default the sum of ``token_log_probs``.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    text: str
    token_ids: list[int]
    token_log_probs: list[float] = Field(description="log p(y_i | x, y_<i) of each token, aligned with token_ids.")
    token_entropies: list[float]
    """Entropy, in nats, of the next-token distribution that each token was chosen from."""
    token_margins: list[float]
    """log p of the most probable token minus log p of the second; inf if only one token is allowed."""
    token_source_attention: list[float] = Field(default_factory=list)
    """For each token, the mean attention mass of the model's retrieval heads on the prompt, its first token left out.
    Empty if the model's retrieval heads are not known, or its attention cannot be seen."""
    passage_attention: list[float] = Field(default_factory=list)
    """With source=: for each passage, the mean over the tokens of the attention mass on it, in [0, 1]. Empty without
    passages, or where token_source_attention is empty."""
    log_prob: float = Field(description="log p_S.")
    con_mlds: float = Field(description="Disagreement of consecutive middle layers.")
    f_mlds: float = Field(description="Disagreement of the middle layers with the final one.")
    score: float = Field(description="The method's score of the span; higher is better.")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def self_information(self) -> float:
        """-log p_S, in nats."""
        return -self.log_prob

    @computed_field  # type: ignore[prop-decorator]
    @property
    def source_attention(self) -> float | None:
        """The mean of ``token_source_attention``, in [0, 1]; `None` if it was not measured.

        Spans that hallucinate tend to have a lower source attention.
        """
        values = self.token_source_attention
        return sum(values) / len(values) if values else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def penalty(self) -> float:
        """log p_S - score: how much the disagreement lowered the span's score."""
        return self.log_prob - self.score


class Candidate(Measured):
    """One of the spans that competed at a risk point."""

    is_greedy: bool = Field(description="Whether greedy decoding would have taken this candidate's first token.")
    ends_answer: bool = Field(False, description="Whether it ends the answer, by an end token.")


class Preceding(ResultModel):
    """The tokens of the answer before a span: their number, and means over the last 4 of them."""

    model_config = ConfigDict(frozen=True)

    tokens: int = 0
    log_prob: float = 0.0
    entropy: float = 0.0
    copied: float = Field(0.0, description="The share of tokens that occur in the prompt.")
    copied_run: float = Field(0.0, description="The mean of Span.token_copied.")


class Span(Measured):
    """A part of the answer, with its risk. The texts of all spans concatenate to the text of the answer."""

    start: int = Field(description="Offset of its first character in the answer's text.")
    end: int = Field(description="Offset after its last character.")
    kind: Literal["greedy", "risk_point", "given"]
    """greedy: a run in which no token competed; risk_point: the chosen candidate of a risk point; given: a text scored
    as given."""
    candidates: list[Candidate] = Field(default_factory=list)
    """At a risk point, all candidates, ordered by their first token's probability. They are as long as they were
    compared, also if max_new_tokens cut the span."""
    chosen: int | None = Field(None, description="At a risk point, the index of the chosen candidate.")
    token_copied: list[int] = Field(default_factory=list)
    """For each token, the length of the longest run of answer tokens that ends with it and occurs in the prompt, at
    most 3; 0 if the token does not occur in the prompt."""
    token_ends: list[int] = Field(default_factory=list)
    """For each token, the offset in the answer's text after its last complete character. Empty if it is not known."""
    preceding: Preceding = Field(default_factory=Preceding, description="The tokens before the span.")
    probe: float | None = None
    """Score of the calibrator's probe: the projection of the span's mean hidden state on the direction that separates
    hallucinated from supported spans. `None` without a calibrator that has a probe."""
    answer_probe: float | None = None
    """The same of the probe that separates wrong from right answers. An answer's score is the mean over its tokens."""
    top_log_probs: list[list[tuple[int, float]]] | None = None
    """With CocoaConfig.top_logprobs: for each token, the most probable tokens of the distribution that its
    log-probability was taken from, as ids with log-probabilities, most probable first. Fewer if fewer tokens are
    allowed. `None` without this setting."""
    risk: float | None
    """How likely the span is to be hallucinated, by ``risk_source``: in [0, 1], unless a raw MLDS was asked for. `None`
    if it was not measured."""
    risk_source: RiskSource | None = None
    """Where the risk comes from. calibrator: an estimated probability; source_attention: the rank of the span's source
    attention among spans of the same model; token_probability: 1 - p of its least probable token; f_mlds, con_mlds: the
    raw MLDS, because ``CocoaConfig.risk`` asks for it."""
    flagged: bool = False
    """Whether the risk reaches the threshold of its source (``Generation.threshold``)."""
    out_of_domain: bool = False
    """Whether the span is unlike those that the calibrator was fitted on. Its risk may be meaningless."""
    reaches_max_risk: bool = Field(False, description="Whether the risk reaches CocoaConfig.max_risk.")
    repeats: bool = False
    """Whether the answer runs in a loop where the span ends: its last 24 tokens are one sequence of at most 8 tokens,
    over and over. Such tokens are probable, so that the risk is low."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def calibrated(self) -> bool:
        """Whether the risk is an estimated probability."""
        return self.risk_source == "calibrator"


CLOSED_BOOK_TOKENS = 64  # prompts of at most this many tokens hold a question, and hardly a passage


class Usage(ResultModel):
    """The cost of a decode."""

    model_config = ConfigDict(frozen=True)

    prompt_tokens: int
    completion_tokens: int
    risk_points: int = Field(0, description="Steps at which more than one token competed and branches were grown.")
    cached_tokens: int = Field(0, description="Prompt tokens reused from another sequence with the same prefix.")
    forward_passes: int = Field(0, description="Forward passes that this answer took part in, including the prompt's.")
    fed_tokens: int = 0
    """Tokens fed to the model after the prompt, including those of dropped branches, of a prompt that is scored again
    (Diver) and of a masked model (DeCoRe)."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens
