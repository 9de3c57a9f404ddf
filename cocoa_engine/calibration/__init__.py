"""A risk in [0, 1]: the statistics of a span or an answer as the probability that it is hallucinated.

Fitting needs scikit-learn (the extra ``risk``). A fitted calibrator needs nothing beyond this package.
"""

from __future__ import annotations

from cocoa_engine.calibration.calibrator import CalibrationWarning, RiskCalibrator
from cocoa_engine.calibration.features import ANSWER_FEATURES, SPAN_FEATURES, answer_features, span_features

__all__ = [
    "ANSWER_FEATURES",
    "SPAN_FEATURES",
    "CalibrationWarning",
    "RiskCalibrator",
    "answer_features",
    "span_features",
]
