"""The risk of spans and answers, and of the words, claims and sentences that a person reads.

Fitting a calibrator needs scikit-learn (the extra ``risk``) and :mod:`cocoa_engine.lab`. A fitted one needs neither.
"""

from cocoa_engine.risk.calibrator import CalibrationWarning, RiskCalibrator, embedded_calibrator
from cocoa_engine.risk.units import LOWEST_SHADE, Check, MeasuredText, Unit, UnitLevel, riskiest, tokens_of

__all__ = [
    "LOWEST_SHADE",
    "CalibrationWarning",
    "Check",
    "MeasuredText",
    "RiskCalibrator",
    "Unit",
    "UnitLevel",
    "embedded_calibrator",
    "riskiest",
    "tokens_of",
]
