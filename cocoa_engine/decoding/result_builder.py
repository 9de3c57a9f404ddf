"""Builds results from decided spans: spans with offsets in the text, usage, and the whole generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.branch import DecidedSpan
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.execution.backends import TokenTree
from cocoa_engine.model.detokenizer import SpanTexts
from cocoa_engine.results import Generation
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.risk.policy import RiskMeasure, reaches
from cocoa_engine.spans import Span, Usage

LOOP = 24
"""The number of tokens in which a loop is looked for."""
LONGEST = 8
"""The number of tokens in the longest sequence that a loop repeats."""


class ResultBuilder:
    """Collects the spans of one sequence and builds its :class:`~cocoa_engine.Generation`.

    Args:
        config: the settings as the user gave them.
        prompt_tokens: length of the prompt.
        model_name: the model name to store in the result.
        measure: computes the risk of the spans and of the answer.
        question_tokens: length of the prompt without the earlier exchange of a chat; `None` without one.
    """

    def __init__(
        self,
        config: CocoaConfig,
        prompt_tokens: int,
        model_name: str | None,
        measure: RiskMeasure,
        question_tokens: int | None = None,
    ) -> None:
        self._config = config
        self._question_tokens = question_tokens
        self._prompt_tokens = prompt_tokens
        self._model_name = model_name
        self._measure = measure
        self._texts = SpanTexts()
        self._spans: list[Span] = []
        self._last: list[int] = []  # tokens

    def ready(self, decoder: SpanDecoder) -> list[Span]:
        """The spans that have become final since the last call."""
        ends = [decided.text_end for decided in decoder.decided]
        ranges = self._texts.ready(decoder.track, ends, decoder.has_ended())
        fresh = []
        for decided, text_range in zip(decoder.decided[len(self._spans) :], ranges, strict=False):
            self._last = [*self._last, *decided.token_ids][-LOOP:]
            span = make_span(decided, text_range, self._config, self._measure)
            fresh.append(span.model_copy(update={"repeats": True}) if is_loop(self._last) else span)
        self._spans.extend(fresh)
        return fresh

    def generation(self, decoder: SpanDecoder, tree: TokenTree) -> Generation:
        """The whole answer. Call it once the sequence has ended and :meth:`ready` has returned every span."""
        token_ids = [token_id for span in self._spans for token_id in span.token_ids]
        generation = Generation(
            text="".join(span.text for span in self._spans),
            token_ids=token_ids,
            spans=self._spans,
            finish_reason=decoder.finish_reason,
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(token_ids),
                risk_points=sum(span.kind == "risk_point" for span in self._spans),
                cached_tokens=tree.cached_tokens,
                forward_passes=tree.forward_passes,
                fed_tokens=tree.fed_tokens,
            ),
            config=self._config,
            model_name=self._model_name,
            processed=bool(decoder.rules.processors),
            threshold=self._measure.threshold_of(self._spans[0].risk_source) if self._spans else None,
            source_heads=source_heads_of(self._spans, self._measure),
            question_tokens=self._question_tokens,
        )
        return with_answer_risk(generation, self._measure.calibrator)


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether the last :data:`LOOP` tokens repeat one sequence of at most :data:`LONGEST` tokens."""
    last = token_ids[-LOOP:]
    return len(last) == LOOP and any(last[size:] == last[:-size] for size in range(1, LONGEST + 1))


def make_span(
    decided: DecidedSpan,
    text_range: tuple[int, int, str],
    config: CocoaConfig,
    measure: RiskMeasure,
    *,
    given: bool = False,
) -> Span:
    """The result for a decided span.

    Args:
        decided: the span.
        text_range: ``(start, end, text)`` of the span in the answer.
        config: the settings that determine the limit of the risk.
        measure: computes the risk.
        given: whether the span is a given text that was scored, rather than decoded.
    """
    start, end, text = text_range
    risk = measure(decided)
    return Span(
        text=text,
        start=start,
        end=end,
        kind="given" if given else "risk_point" if decided.candidates else "greedy",
        token_ids=decided.token_ids,
        token_log_probs=decided.token_log_probs,
        token_entropies=decided.token_entropies,
        token_margins=decided.token_margins,
        token_source_attention=decided.token_source_attention,
        passage_attention=decided.passage_attention,
        log_prob=decided.log_prob,
        con_mlds=decided.con_mlds,
        f_mlds=decided.f_mlds,
        score=decided.score,
        candidates=decided.candidates,
        chosen=decided.chosen,
        token_copied=decided.token_copied,
        token_ends=_token_ends(decided, start, end),
        preceding=decided.preceding,
        probe=decided.probe,
        top_log_probs=decided.top_log_probs,
        risk=risk.value,
        risk_source=risk.source,
        flagged=risk.flagged,
        out_of_domain=measure.is_out_of_domain(decided),
        reaches_max_risk=reaches(risk.value, config.max_risk),
    )


def _token_ends(decided: DecidedSpan, start: int, end: int) -> list[int]:
    """Where each token ends in the text that the span reports. The last one ends with the span."""
    if len(decided.token_ends) < len(decided.token_ids):
        return []
    ends = [min(max(at, start), end) for at in decided.token_ends[: len(decided.token_ids)]]
    return [*ends[:-1], end]


def source_heads_of(spans: Sequence[Span], measure: RiskMeasure) -> Literal["spread"] | None:
    """What the heads of the spans' source attention are, for :attr:`.Generation.source_heads`."""
    return "spread" if measure.spread and any(span.token_source_attention for span in spans) else None


def with_answer_risk(generation: Generation, calibrator: RiskCalibrator | None) -> Generation:
    """The answer as the calibrator rates it; without a calibrator as it is."""
    return generation if calibrator is None else calibrator.rated(generation)
