"""What a decode returns: plain data, JSON in and out (``model_dump_json`` round-trips)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import con_mlds_of, f_mlds_of
from cocoa_engine.spans import Competition, FinishReason, Span, Usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


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
        """The span's ConMLDS."""
        return con_mlds_of(self.consecutive, self.middle_layers)

    @property
    def f_mlds(self) -> float:
        """The span's fMLDS."""
        return f_mlds_of(self.to_final, self.middle_layers)

    def plot(self) -> Figure:
        """Both disagreements layer by layer, the middle window shaded.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import layer_curve

        return layer_curve(self)
