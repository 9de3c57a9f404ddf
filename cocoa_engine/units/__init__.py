"""Words, claims and sentences of an answer: what a person reads, each with a risk."""

from cocoa_engine.units.measuring import LOWEST_SHADE, MeasuredText, riskiest
from cocoa_engine.units.unit import Check, Part, Unit, UnitLevel

__all__ = ["LOWEST_SHADE", "Check", "MeasuredText", "Part", "Unit", "UnitLevel", "riskiest"]
