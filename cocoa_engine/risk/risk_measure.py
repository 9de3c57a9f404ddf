"""Which value of a span is its risk, and from which threshold it is flagged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import improbability
from cocoa_engine.errors import ConfigError
from cocoa_engine.methods.retrieval_heads import RetrievalHeads
from cocoa_engine.risk.calibrator import RiskCalibrator
from cocoa_engine.risk.features import SpanStatistics
from cocoa_engine.risk.fitted_risk import threshold_of
from cocoa_engine.spans import RiskSource

TOKEN_THRESHOLD = 0.9
"""The risk from which a span is flagged by its least probable token: a token of probability 0.1 or less."""


RANK_THRESHOLD = 0.95
"""The risk from which a span is flagged by its source attention: it is among the twentieth of the model's spans that
attend least to their source. Of 108 right answers about a passage, 82 % have no such span."""

THRESHOLDS: dict[RiskSource, float] = {"source_attention": RANK_THRESHOLD, "token_probability": TOKEN_THRESHOLD}


class RiskOfSpan(NamedTuple):
    """The risk of one span: its value (`None` if it was not measured), its source, and the source's threshold."""

    value: float | None
    source: RiskSource
    threshold: float | None

    @property
    def flagged(self) -> bool:
        """Whether the risk reaches the threshold."""
        return reaches(self.value, self.threshold)


@dataclass(frozen=True)
class RiskMeasure:
    """How the risk of a span is computed in one call.

    Attributes:
        source: the value that the risk is computed from.
        calibrator: the calibrator of the call, which may estimate the risk of spans, of answers, or of both.
        heads: the model's retrieval heads, whose reference distribution ranks source attention.
        otherwise: what the risk of a span is computed from if ``source`` was not measured for it; `None`: it has none.
        spread: whether the source attention is that of heads that were not searched for. See
            :func:`~cocoa_engine.methods.retrieval_heads.spread_heads`.
    """

    source: RiskSource
    calibrator: RiskCalibrator | None = None
    heads: RetrievalHeads | None = None
    otherwise: RiskSource | None = None
    spread: bool = False

    def __call__(self, span: SpanStatistics) -> RiskOfSpan:
        """The risk of a span."""
        source, value = self.source, self._value(self.source, span)
        if value is None and self.otherwise is not None:
            source, value = self.otherwise, self._value(self.otherwise, span)
        return RiskOfSpan(value, source, self.threshold_of(source))

    def is_out_of_domain(self, span: SpanStatistics) -> bool:
        """Whether a span's risk is the calibrator's, and the span is unlike those that it was fitted on."""
        if self.source != "calibrator":
            return False
        assert self.calibrator is not None
        return self.calibrator.is_out_of_domain(span)

    def threshold_of(self, source: RiskSource | None) -> float | None:
        """The threshold of a source of risk; `None` if there is none, as for a raw MLDS."""
        if source == "calibrator":
            assert self.calibrator is not None
            assert self.calibrator.span is not None
            return threshold_of(self.calibrator.span)
        return None if source is None else THRESHOLDS.get(source)

    def _value(self, source: RiskSource, span: SpanStatistics) -> float | None:
        if source == "calibrator":
            assert self.calibrator is not None
            return self.calibrator.risk(span)
        if source == "source_attention":
            assert self.heads is not None
            values = span.token_source_attention
            return self.heads.rank(sum(values) / len(values)) if values else None
        if source == "token_probability":
            return token_risk(span.token_log_probs)
        return span.f_mlds if source == "f_mlds" else span.con_mlds


def token_risk(token_log_probs: list[float]) -> float:
    """1 - p of the least probable token of a span, in [0, 1]."""
    return improbability(min(token_log_probs))


def reaches(risk: float | None, threshold: float | None) -> bool:
    """Whether a risk is at least a threshold. A risk that is not a finite number reaches every threshold."""
    return threshold is not None and risk is not None and not risk < threshold


def risk_measure(
    config: CocoaConfig,
    calibrator: RiskCalibrator | None = None,
    heads: RetrievalHeads | None = None,
    *,
    has_source: bool = False,
) -> RiskMeasure:
    """The risk of a call's spans, by ``CocoaConfig.risk``.

    Args:
        config: the settings of the call.
        calibrator: the calibrator that applies to the call, if any.
        heads: the model's retrieval heads, if they are known.
        has_source: whether the caller named the passages that the answer should come from.

    Raises:
        ConfigError: the risk that is asked for cannot be measured: there is no calibrator for spans, or no reference
            distribution of source attention.
    """
    fitted = None if calibrator is None else calibrator.span
    ranks = heads is not None and heads.reference is not None
    if config.risk == "auto":
        if fitted is not None:
            return RiskMeasure("calibrator", calibrator)
        if has_source and ranks:
            return RiskMeasure("source_attention", calibrator, heads, otherwise="token_probability")
        return RiskMeasure("token_probability", calibrator)
    if config.risk == "calibrator" and fitted is None:
        raise ConfigError(
            "risk='calibrator' needs a calibrator that was fitted on spans for this model and these settings; fit "
            "one with `cocoa calibrate` and pass it as calibrator, or leave risk at 'auto'."
        )
    if config.risk == "source_attention" and not ranks:
        raise ConfigError(
            "risk='source_attention' needs the model's retrieval heads and a reference distribution; find both with "
            "`cocoa heads`, or leave risk at 'auto'."
        )
    return RiskMeasure(config.risk, calibrator, heads)
