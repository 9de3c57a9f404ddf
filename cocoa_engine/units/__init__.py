"""Words, claims and sentences of an answer: what a person reads, each with a risk."""

from cocoa_engine.units.claims import content_words
from cocoa_engine.units.clauses import Clause, Stretch, clauses, marked_stretches
from cocoa_engine.units.measuring import LOWEST_SHADE, MeasuredText, riskiest, tokens_of
from cocoa_engine.units.unit import Check, Part, Unit, UnitLevel
from cocoa_engine.units.words import is_unspaced

__all__ = [
    "LOWEST_SHADE",
    "Check",
    "Clause",
    "MeasuredText",
    "Part",
    "Stretch",
    "Unit",
    "UnitLevel",
    "clauses",
    "content_words",
    "is_unspaced",
    "marked_stretches",
    "riskiest",
    "tokens_of",
]
