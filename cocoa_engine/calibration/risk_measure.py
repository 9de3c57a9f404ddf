"""Which value of a span is its risk, and from which threshold it is flagged."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cocoa_engine.calibration.calibrator import RiskCalibrator
from cocoa_engine.calibration.features import SpanStatistics
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.spans import RiskSource

TOKEN_THRESHOLD = 0.9
"""The risk from which a span is flagged by its least probable token: a token of probability 0.1 or less."""


@dataclass(frozen=True)
class RiskMeasure:
    """How the risk of a span is computed.

    Attributes:
        source: the value that the risk is computed from.
        threshold: the risk from which a span is flagged; `None` if there is none, as for a raw MLDS.
        calibrator: the calibrator of the call, which may estimate the risk of spans, of answers, or of both.
    """

    source: RiskSource
    threshold: float | None = None
    calibrator: RiskCalibrator | None = None

    def __call__(self, span: SpanStatistics) -> float | None:
        """The risk of a span; `None` if it was not measured."""
        if self.source == "calibrator":
            assert self.calibrator is not None
            return self.calibrator.risk(span)
        if self.source == "token_probability":
            return token_risk(span.token_log_probs)
        return span.f_mlds if self.source == "f_mlds" else span.con_mlds

    def flags(self, risk: float | None) -> bool:
        """Whether a risk reaches the threshold."""
        return self.threshold is not None and reaches(risk, self.threshold)


def token_risk(token_log_probs: list[float]) -> float:
    """1 - p of the least probable token of a span, in [0, 1]."""
    return -math.expm1(min(token_log_probs))


def reaches(risk: float | None, threshold: float | None) -> bool:
    """Whether a risk is at least a threshold. A risk that is not a finite number reaches every threshold."""
    return threshold is not None and risk is not None and not risk < threshold


def risk_measure(config: CocoaConfig, calibrator: RiskCalibrator | None = None) -> RiskMeasure:
    """The risk of a call's spans, by ``CocoaConfig.risk``.

    Args:
        config: the settings of the call.
        calibrator: the calibrator that applies to the call, if any.

    Raises:
        ConfigError: a calibrated risk is asked for, and there is no calibrator for spans.
    """
    fitted = None if calibrator is None else calibrator.span
    source = config.risk
    if source == "auto":
        source = "token_probability" if fitted is None else "calibrator"
    if source == "calibrator":
        if fitted is None:
            raise ConfigError(
                "risk='calibrator' needs a calibrator that was fitted on spans for this model and these settings; fit "
                "one with `cocoa calibrate` and pass it as calibrator, or leave risk at 'auto'."
            )
        return RiskMeasure(source, None if fitted.threshold is None else fitted.threshold.value, calibrator)
    return RiskMeasure(source, TOKEN_THRESHOLD if source == "token_probability" else None, calibrator)
