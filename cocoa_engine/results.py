"""What the engine's calls return: plain data that round-trips through JSON (``model_dump_json``)."""

from __future__ import annotations

import math
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
    token_ids: list[int] = Field(description="Every generated token, including an end-of-sequence token.")
    spans: list[Span]
    finish_reason: FinishReason | None = Field(
        description="stop: a stop text, stop token or stopping criterion; eos; length; risk: the last span's risk "
        "reaches max_risk, which takes precedence over the other reasons. `None` for a text scored as given."
    )
    usage: Usage
    config: CocoaConfig = Field(description="The settings of the decode.")
    model_name: str | None = None
    answer_risk: float | None = Field(
        None, description="Probability that the answer is wrong as a whole. `None` without a calibrator for answers."
    )
    processed: bool = Field(
        False,
        description="Whether logits processors, such as a repetition penalty, changed the model's distribution. The "
        "log-probabilities are then those of the changed distribution.",
    )
    competition: Competition | None = Field(
        None,
        description="For a text scored as given with a calibrator for answers: a summary of the candidates at its risk "
        "points. For a decoded answer, the spans hold their candidates instead.",
    )

    @property
    def calibrated(self) -> bool:
        """Whether the spans' risks are calibrated."""
        return bool(self.spans) and all(span.calibrated for span in self.spans)

    @property
    def max_risk(self) -> float:
        """The highest risk of any span, 0.0 without spans; NaN if a risk is NaN."""
        return max((span.risk for span in self.spans), key=lambda risk: (math.isnan(risk), risk), default=0.0)

    @property
    def mean_risk(self) -> float:
        """The mean risk of the spans, 0.0 without spans."""
        return sum(span.risk for span in self.spans) / len(self.spans) if self.spans else 0.0

    def to_html(self, *, compared: Sequence[Generation] = (), title: str | None = None, full: bool = True) -> str:
        """The answer as HTML, every span shaded by its risk.

        Hovering over a span shows its scores and the candidates it competed with. The HTML is self-contained: it
        includes its styles, has no script and fetches nothing.

        Args:
            compared: other answers to the same prompt, shown beside this one with the differences marked.
            title: a heading, such as the question.
            full: return a complete page, otherwise a fragment that can be put into any page, as for notebooks.
        """
        from cocoa_engine.rendering.html import document, fragment

        return (document if full else fragment)([self, *compared], title=title)

    def render(self, format: str, *, compared: Sequence[Generation] = (), title: str | None = None) -> str:
        """The answer as a document in one of the formats of :data:`~cocoa_engine.rendering.documents.DOCUMENTS`.

        Args:
            format: ``"html"``, ``"markdown"`` or ``"svg"`` (a picture of the terminal's output).
            compared: other answers to the same prompt, shown with this one.
            title: a heading, such as the question.

        Raises:
            ConfigError: the format is unknown.
        """
        from cocoa_engine.rendering.documents import render

        return render([self, *compared], format, title=title)

    def _repr_html_(self) -> str:
        return self.to_html(full=False)

    def to_markdown(self) -> str:
        """The answer as Markdown, with levels of risk in the text (``[like this|2]``), a legend and the risk points."""
        from cocoa_engine.rendering.markdown import to_markdown

        return to_markdown(self)

    def to_rich(
        self, *, compared: Sequence[Generation] = (), table: bool = False, marks: bool = False
    ) -> RenderableType:
        """The answer coloured by risk, for ``rich.print``.

        Args:
            compared: other answers to the same prompt, shown beside this one with the differences marked.
            table: add every candidate of every risk point.
            marks: write the level of risk into the text, ``[like this|2]``, for output without colour.
        """
        from cocoa_engine.rendering.terminal import report

        return report([self, *compared], table=table, marks=marks)

    def plot(self) -> Figure:
        """Both MLDS of every span as bars. :meth:`LayerCurve.plot` shows the layers of one span.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import mlds_by_span

        return mlds_by_span(self)


class LayerCurve(BaseModel):
    """How the layers disagree about one span, from the embedding (layer 0) to the final layer L.

    dis(a, b) = 1 - cos(H[S, a], H[S, b]), where H[S, l] is the mean state of the span's tokens after layer l.
    """

    model_config = ConfigDict(frozen=True)

    text: str = Field(description="The span's text.")
    consecutive: list[float] = Field(description="dis(j, j + 1) for j = 0..L-1.")
    to_final: list[float] = Field(description="dis(j, L) for j = 0..L-1.")
    middle_layers: tuple[int, int] = Field(description="The window (m, n) of the MLDS, both inclusive.")
    final_layer: Literal["post_norm", "pre_norm"] = Field(
        description="Whether the state of layer L is taken after the final norm."
    )

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
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
        """Both disagreements layer by layer, with the middle window shaded.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import layer_curve

        return layer_curve(self)
