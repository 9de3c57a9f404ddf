"""What a decode returns: plain data, JSON in and out (``model_dump_json`` round-trips)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from cocoa_engine.config import CocoaConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

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


class Generation(BaseModel):
    """An answer with the risk of each of its spans."""

    model_config = ConfigDict(frozen=True)

    text: str
    token_ids: list[int] = Field(description="Every generated token, an end-of-sequence token included.")
    spans: list[Span]
    finish_reason: FinishReason | None = Field(
        description="stop: a stop text, stop token or stopping criterion; eos; length; risk: the last span's "
        "reaches max_risk, whatever else may have ended the answer there; none for a text scored as given."
    )
    usage: Usage
    config: CocoaConfig = Field(description="The settings it was made with.")
    model_name: str | None = None
    answer_risk: float | None = Field(
        None, description="Probability that the answer is wrong as a whole; none without a calibrator for answers."
    )

    processed: bool = Field(
        False,
        description="Whether logits processors (a repetition penalty, say) acted: the log-probabilities are then those "
        "of what they made of the model's own distribution.",
    )
    competition: Competition | None = Field(
        None,
        description="Of a text scored as given with a calibrator of answers, what would have competed in it; of a "
        "decoded answer the spans' candidates say it.",
    )

    @property
    def calibrated(self) -> bool:
        """Whether the spans' risks are calibrated."""
        return bool(self.spans) and all(span.calibrated for span in self.spans)

    @property
    def max_risk(self) -> float:
        """The highest risk of any span; 0.0 without spans."""
        return max((span.risk for span in self.spans), default=0.0)

    @property
    def mean_risk(self) -> float:
        """The mean risk over spans; 0.0 without spans."""
        return sum(span.risk for span in self.spans) / len(self.spans) if self.spans else 0.0

    def to_html(self, *, compared: Sequence[Generation] = (), title: str | None = None, full: bool = True) -> str:
        """The answer with every span shaded by its risk; pointing at one shows its figures and what competed.

        Self-contained: styles are inside, there is no script, and nothing is fetched.

        Args:
            compared: other answers to the same prompt, to stand beside it with the differences marked.
            title: what to put above it, such as the question.
            full: a whole page; otherwise a fragment that can stand in any page, as notebooks show it.
        """
        from cocoa_engine.rendering.html import document, fragment

        return (document if full else fragment)([self, *compared], title=title)

    def _repr_html_(self) -> str:
        return self.to_html(full=False)

    def to_markdown(self) -> str:
        """The answer with its risk in the text, ``[like this|2]``, a legend, and a table of its risk points."""
        from cocoa_engine.rendering.markdown import to_markdown

        return to_markdown(self)

    def to_rich(
        self, *, compared: Sequence[Generation] = (), table: bool = False, marks: bool = False
    ) -> RenderableType:
        """The answer coloured by risk, for ``rich.print``.

        Args:
            compared: other answers to the same prompt, to stand beside it with the differences marked.
            table: add every candidate of every risk point.
            marks: write the risk into the text, ``[like this|2]``, for output without colour.
        """
        from cocoa_engine.rendering.terminal import report

        return report([self, *compared], table=table, marks=marks)

    def plot(self) -> Figure:
        """Both MLDS along the text, a bar for each span; the layers of one span are :meth:`LayerCurve.plot`'s.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import mlds_along

        return mlds_along(self)


class LayerCurve(BaseModel):
    """How the layers disagree about one span, from the embedding (layer 0) to the final layer L.

    With H[S, l] the mean state of the span's tokens after layer l, and dis(a, b) = 1 - cos(H[S, a], H[S, b]).
    """

    model_config = ConfigDict(frozen=True)

    text: str = Field(description="The span's text.")
    consecutive: list[float] = Field(description="dis(j, j + 1) for j = 0..L-1.")
    to_final: list[float] = Field(description="dis(j, L) for j = 0..L-1.")
    middle_layers: tuple[int, int] = Field(description="The window (m, n) that the MLDS are taken over.")
    final_layer: Literal["post_norm", "pre_norm"] = Field(description="Whether layer L is after the final norm.")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.to_final)

    @property
    def con_mlds(self) -> float:
        """(1 / N) * sum_{j=m}^{n-1} dis(j, j + 1), with N = n - m + 1."""
        m, n = self.middle_layers
        return sum(self.consecutive[m:n]) / (n - m + 1)

    @property
    def f_mlds(self) -> float:
        """(1 / N) * sum_{j=m}^{n} dis(j, L), with N = n - m + 1; dis(L, L) is 0."""
        m, n = self.middle_layers
        return sum(self.to_final[m : n + 1]) / (n - m + 1)

    def plot(self) -> Figure:
        """Both disagreements layer by layer, the middle window shaded.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import layer_curve

        return layer_curve(self)
