"""Calibrated risk: the probability, from its statistics, that a span or an answer is hallucinated.

Fitting needs scikit-learn (the extra ``risk``). A fitted calibrator needs nothing beyond this package.
"""

from __future__ import annotations

from cocoa_engine.calibration.calibrator import CalibrationWarning, RiskCalibrator, embedded_calibrator
from cocoa_engine.calibration.features import ANSWER_FEATURES, SPAN_FEATURES, answer_features, span_features

__all__ = [
    "ANSWER_FEATURES",
    "SPAN_FEATURES",
    "CalibrationWarning",
    "RiskCalibrator",
    "answer_features",
    "embedded_calibrator",
    "span_features",
]
