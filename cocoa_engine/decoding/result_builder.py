"""From decided spans to the result a user gets: places in the text, usage, the whole generation."""

from __future__ import annotations

from cocoa_engine.calibration import RiskCalibrator
from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.span_decoder import DecidedSpan, SpanDecoder
from cocoa_engine.decoding.span_scoring import log_prob_and_score, ranking_mlds, reaches_max_risk, reported_risk
from cocoa_engine.execution.backends import TokenTree
from cocoa_engine.model.detokenizer import SpanTexts
from cocoa_engine.results import Generation
from cocoa_engine.spans import Span, Usage


class ResultBuilder:
    """Collects the spans of one sequence.

    Args:
        config: the settings as the user gave them.
        prompt_tokens: length of the prompt.
        model_name: for the record.
        calibrator: gives the spans' risk; none leaves the raw MLDS.
    """

    def __init__(
        self,
        config: CocoaConfig,
        prompt_tokens: int,
        model_name: str | None,
        calibrator: RiskCalibrator | None = None,
    ) -> None:
        self._calibrator = calibrator
        self._config = config
        self._prompt_tokens = prompt_tokens
        self._model_name = model_name
        self._texts = SpanTexts()
        self.spans: list[Span] = []

    def ready(self, sequencer: SpanDecoder) -> list[Span]:
        """The spans that have become final since the last call."""
        ends = [decided.text_end for decided in sequencer.decided]
        places = self._texts.ready(sequencer.track, ends, sequencer.has_ended())
        fresh = [
            make_span(decided, place, self._config, self._calibrator)
            for decided, place in zip(sequencer.decided[len(self.spans) :], places, strict=False)
        ]
        self.spans.extend(fresh)
        return fresh

    def generation(self, sequencer: SpanDecoder, tree: TokenTree) -> Generation:
        """The whole answer, once the sequence has ended and every span was fetched."""
        token_ids = [token_id for span in self.spans for token_id in span.token_ids]
        return Generation(
            text="".join(span.text for span in self.spans),
            token_ids=token_ids,
            spans=self.spans,
            finish_reason=sequencer.finish_reason,
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(token_ids),
                risk_points=sum(span.kind == "risk_point" for span in self.spans),
                cached_tokens=tree.cached_tokens,
                forward_passes=tree.forward_passes,
                fed_tokens=tree.fed_tokens,
            ),
            config=self._config,
            model_name=self._model_name,
            processed=bool(sequencer.rules.processors),
        )


def make_span(
    decided: DecidedSpan,
    place: tuple[int, int, str],
    config: CocoaConfig,
    calibrator: RiskCalibrator | None = None,
    *,
    given: bool = False,
) -> Span:
    """A decided span at its place ``(start, end, text)``."""
    start, end, text = place
    risk = reported_risk(config, calibrator, decided)
    return Span(
        text=text,
        start=start,
        end=end,
        kind="given" if given else "risk_point" if decided.candidates else "greedy",
        token_ids=decided.token_ids,
        token_log_probs=decided.token_log_probs,
        token_entropies=decided.token_entropies,
        token_margins=decided.token_margins,
        log_prob=decided.log_prob,
        con_mlds=decided.con_mlds,
        f_mlds=decided.f_mlds,
        score=decided.score,
        candidates=decided.candidates,
        chosen=decided.chosen,
        token_copied=decided.token_copied,
        preceding=decided.preceding,
        risk=risk,
        calibrated=calibrator is not None,
        reaches_max_risk=reaches_max_risk(config, risk),
    )


def weighed_otherwise(span: Span, config: CocoaConfig) -> Span:
    """A text that was scored, under another method, metric or alpha: what the model said of it stays as it is.

    For methods whose score is made of log p_S and the disagreement alone.
    """
    log_prob, score = log_prob_and_score(config, span.token_log_probs, span.con_mlds, span.f_mlds)
    risk = span.risk if span.calibrated else ranking_mlds(config, span.con_mlds, span.f_mlds)
    reaches = reaches_max_risk(config, risk)
    return span.model_copy(update={"log_prob": log_prob, "score": score, "risk": risk, "reaches_max_risk": reaches})
