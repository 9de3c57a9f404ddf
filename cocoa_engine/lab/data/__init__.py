"""Labelled data sets: answers with labels of hallucinated parts. One record type, one reader per format."""

from __future__ import annotations

from cocoa_engine.lab.data.formats import FORMATS, detect_format, read_labelled
from cocoa_engine.lab.data.questions import Question, read_questions
from cocoa_engine.lab.data.records import LabelledSpan, LabelledText, checked, sample

__all__ = [
    "FORMATS",
    "LabelledSpan",
    "LabelledText",
    "Question",
    "checked",
    "detect_format",
    "read_labelled",
    "read_questions",
    "sample",
]
