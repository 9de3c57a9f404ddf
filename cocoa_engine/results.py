"""What the engine's calls return: plain data that round-trips through JSON (``model_dump_json``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import Self

from cocoa_engine.arguments import ResultModel
from cocoa_engine.config import CocoaConfig
from cocoa_engine.risk import Check, MeasuredText, Unit
from cocoa_engine.spans import CLOSED_BOOK_TOKENS, AnswerRiskSource, FinishReason, RiskSource, Span, Usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


class Generation(ResultModel):
    """An answer with the risk of each of its spans."""

    model_config = ConfigDict(frozen=True)

    text: str
    token_ids: list[int] = Field(description="Every generated token, including an end-of-sequence token.")
    spans: list[Span]
    finish_reason: FinishReason | None
    """stop: a stop text, stop token or stopping criterion; eos; length; risk: the last span's risk reaches max_risk,
    which takes precedence over the other reasons. `None` for a text scored as given."""
    usage: Usage
    config: CocoaConfig = Field(description="The settings of the decode.")
    model_name: str | None = None
    answer_risk: float | None = None
    """The risk of the answer as a whole, in [0, 1], by ``answer_risk_source``. `None` without spans, and for a text
    scored as given without a calibrator for answers."""
    answer_risk_source: AnswerRiskSource | None = None
    """calibrator: the estimated probability that the answer is wrong. rank: the share of right answers that were less
    surprising to the model, see ``RightAnswers``; it is not a probability."""
    threshold: float | None = None
    """The risk from which spans are flagged: the calibrator's chosen threshold, or the default of ``risk_source``.
    `None` if there is none, as for a raw MLDS."""
    answer_threshold: float | None = None
    """The threshold of ``answer_risk``; a rank reaches its threshold in a tenth of the right answers."""
    calibrated_on: str | None = None
    """What ``answer_risk`` was fitted on, or whose right answers it is ranked among. It holds for answers like those
    only."""
    answer_out_of_domain: bool = False
    """Whether the answer as a whole is unlike those that `answer_risk` was fitted on or is ranked among, which are
    short: of a rank, whether it has more than 24 tokens. The risk may then mean little."""
    out_of_domain: bool = False
    """Whether the answer is unlike those that the calibrator was fitted on: as a whole, or in more than a tenth of its
    spans, and at least two. Its risks may be meaningless."""
    source_heads: Literal["spread"] | None = None
    """`spread`: the source attention of the spans is that of heads spread over the layers, because the model's
    retrieval heads are not known (`cocoa heads` finds them). `None` otherwise, and where no source attention was
    measured."""
    question_tokens: int | None = None
    """The number of tokens that the prompt of a chat has without its earlier exchange: with the system messages and the
    longest message of the user. `None` without one."""

    @property
    def calibrated(self) -> bool:
        """Whether the spans' risks are calibrated."""
        return self.risk_source == "calibrator"

    @property
    def risk_source(self) -> RiskSource | None:
        """Where the spans' risks come from; `None` without spans."""
        return self.spans[0].risk_source if self.spans else None

    @property
    def has_spans_out_of_domain(self) -> bool:
        """Whether more than a tenth of the spans, and at least two, are out of the calibrator's domain."""
        return sum(span.out_of_domain for span in self.spans) > max(1, len(self.spans) / 10)

    @property
    def closed_book(self) -> bool:
        """Whether the prompt holds no passage: it has at most 64 ``question_tokens``, and no passage was named."""
        counted = self.usage.prompt_tokens if self.question_tokens is None else self.question_tokens
        return counted <= CLOSED_BOOK_TOKENS and not any(span.passage_attention for span in self.spans)

    @property
    def max_risk(self) -> float:
        """The highest risk of any span, 0.0 without spans; NaN if a risk is NaN."""
        return max(self._risks, key=lambda risk: (math.isnan(risk), risk), default=0.0)

    @property
    def mean_risk(self) -> float:
        """The mean risk of the spans, 0.0 without spans."""
        return sum(self._risks) / len(self._risks) if self._risks else 0.0

    @property
    def _risks(self) -> list[float]:
        return [span.risk for span in self.spans if span.risk is not None]

    @property
    def verdict(self) -> str:
        """One or two sentences: the risk of the answer as a whole, or what its shading means without it."""
        from cocoa_engine.rendering.wording import verdict

        return verdict(self)

    @property
    def words(self) -> list[Unit]:
        """The words of the text. Those of a script that is written without spaces are its tokens."""
        return self._measured.words

    @property
    def claims(self) -> list[Unit]:
        """The names, numbers, dates, short quotations and content words of the text, each with its risk.

        The risk of a word or a claim is the highest of its spans.
        """
        return self._measured.claims

    @property
    def sentences(self) -> list[Unit]:
        """The sentences of the text. The risk of a sentence is the mean of its three riskiest claims."""
        return self._measured.sentences

    def check_these(self, most: int = 3) -> list[Check]:
        """The riskiest claims, riskiest first, with the reasons and what competed with them.

        Only claims that are shaded are listed: those with a risk of at least 0.25, or one that reaches the default
        threshold. By a raw MLDS none are. Claims as low as the lowest of the answer are left out too.

        Args:
            most: the largest number of claims.

        Raises:
            ValueError: ``most`` is negative.
        """
        return self._measured.check_these(most)

    @cached_property
    def _measured(self) -> MeasuredText:
        """The units, computed when they are first asked for. They are neither fields nor copied nor serialised."""
        return MeasuredText(self.text, self.spans, has_source=not self.closed_book)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; see pydantic."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_measured", None)
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        fields = {name: value for name, value in state["__dict__"].items() if name != "_measured"}
        return {**state, "__dict__": fields}

    def to_html(self, *, compared: Sequence[Generation] = (), title: str | None = None, full: bool = True) -> str:
        """The answer as HTML, its riskiest claims shaded by their risk.

        Hovering over a span shows its scores and the candidates it competed with. The HTML is self-contained: it
        includes its styles, has no script and fetches nothing.

        Args:
            compared: other answers to the same prompt, shown beside this one with the differences marked.
            title: a heading, such as the question.
            full: return a complete page, otherwise a fragment for any page, as for notebooks.
        """
        from cocoa_engine.rendering.documents import fragment, html_document

        return (html_document if full else fragment)([self, *compared], title=title)

    def render(self, format: str, *, compared: Sequence[Generation] = (), title: str | None = None) -> str:
        """The answer as a document in one of the formats of :data:`~cocoa_engine.rendering.documents.DOCUMENTS`.

        Args:
            format: ``"html"``, ``"markdown"`` or ``"svg"`` (a picture of the terminal's output).
            compared, title: as for :meth:`to_html`.

        Raises:
            ConfigError: the format is unknown.
        """
        from cocoa_engine.rendering.documents import render

        return render([self, *compared], format, title=title)

    def _repr_html_(self) -> str:
        return self.to_html(full=False)

    def to_markdown(self) -> str:
        """The answer as Markdown, with levels of risk in the text (``[like this|2]``), a legend and the risk points."""
        from cocoa_engine.rendering.documents import to_markdown

        return to_markdown(self)

    def to_rich(
        self, *, compared: Sequence[Generation] = (), table: bool = False, marks: bool = False
    ) -> RenderableType:
        """The answer coloured by risk, for ``rich.print``.

        Args:
            compared: as for :meth:`to_html`.
            table: add every candidate of every risk point.
            marks: write the level of risk into the text, ``[like this|2]``, for output without colour.
        """
        from cocoa_engine.rendering.terminal import report

        return report([self, *compared], table=table, marks=marks)

    def plot(self) -> Figure:
        """Both MLDS of every span as bars.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from cocoa_engine.rendering.plot import mlds_by_span

        return mlds_by_span(self)
