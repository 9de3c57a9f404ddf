"""Words, claims and sentences of an answer: what a person reads, each with a risk."""

from cocoa_engine.units.claims import content_words
from cocoa_engine.units.clauses import Clause, Stretch, clauses, marked_stretches, open_block, open_inline
from cocoa_engine.units.measuring import LOWEST_SHADE, MeasuredText, riskiest, tokens_of
from cocoa_engine.units.sentences import list_marks
from cocoa_engine.units.unit import Check, Part, Unit, UnitLevel
from cocoa_engine.units.words import is_unspaced, word_ranges

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
    "list_marks",
    "marked_stretches",
    "open_block",
    "open_inline",
    "riskiest",
    "tokens_of",
    "word_ranges",
]
