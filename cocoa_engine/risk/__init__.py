"""The risk of spans and answers, and of the words, claims and sentences that a person reads.

Fitting a calibrator needs scikit-learn (the extra ``risk``) and :mod:`cocoa_engine.lab`. A fitted one needs neither.
"""

from cocoa_engine.risk.calibrator import CalibrationWarning, RiskCalibrator, embedded_calibrator
from cocoa_engine.risk.claims import content_words
from cocoa_engine.risk.clauses import clauses, marked_stretches, open_block, open_inline
from cocoa_engine.risk.sentences import list_marks
from cocoa_engine.risk.units import LOWEST_SHADE, Check, MeasuredText, Unit, UnitLevel, riskiest, tokens_of
from cocoa_engine.risk.words import is_unspaced, word_ranges

__all__ = [
    "LOWEST_SHADE",
    "CalibrationWarning",
    "Check",
    "MeasuredText",
    "RiskCalibrator",
    "Unit",
    "UnitLevel",
    "clauses",
    "content_words",
    "embedded_calibrator",
    "is_unspaced",
    "list_marks",
    "marked_stretches",
    "open_block",
    "open_inline",
    "riskiest",
    "tokens_of",
    "word_ranges",
]
