"""The risk of spans and answers, and of the words, claims and sentences that a person reads.

Fitting a calibrator needs scikit-learn (the extra ``risk``) and :mod:`cocoa_engine.lab`. A fitted one needs neither.
"""

from cocoa_engine.risk.calibrator import CalibrationWarning, RiskCalibrator, embedded_calibrator
from cocoa_engine.risk.claims import content_words
from cocoa_engine.risk.clauses import Clause, Stretch, clauses, marked_stretches, open_block, open_inline
from cocoa_engine.risk.features import ANSWER_FEATURES, SPAN_FEATURES, answer_features, span_features
from cocoa_engine.risk.sentences import list_marks
from cocoa_engine.risk.units import LOWEST_SHADE, Check, MeasuredText, Unit, UnitLevel, riskiest, tokens_of
from cocoa_engine.risk.words import is_unspaced, word_ranges

__all__ = [
    "ANSWER_FEATURES",
    "LOWEST_SHADE",
    "SPAN_FEATURES",
    "CalibrationWarning",
    "Check",
    "Clause",
    "MeasuredText",
    "RiskCalibrator",
    "Stretch",
    "Unit",
    "UnitLevel",
    "answer_features",
    "clauses",
    "content_words",
    "embedded_calibrator",
    "is_unspaced",
    "list_marks",
    "marked_stretches",
    "open_block",
    "open_inline",
    "riskiest",
    "span_features",
    "tokens_of",
    "word_ranges",
]
