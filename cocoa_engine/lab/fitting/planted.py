"""Retellings of invented passages with planted errors: given texts in which every hallucinated part is known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

from cocoa_engine.lab.data import LabelledSpan, LabelledText
from cocoa_engine.lab.invented import Fact, Passage, passages

TOLD = 4
"""The number of facts in a retelling."""

FALSE, MISSING = 0.2, 0.2
"""The share of facts that are told with a false value, and of facts that the passage does not state."""


def planted_errors(count: int, seed: int = 0) -> list[LabelledText]:
    """Retellings of invented passages, one for each passage.

    Args:
        count: the number of retellings.
        seed: seed of the passages and of the errors.
    """
    random = Random(seed)
    return list(islice(_retellings(random, seed), count))


def _retellings(random: Random, seed: int) -> Iterator[LabelledText]:
    for number, passage in enumerate(passages(seed)):
        text, spans = _retold(passage, random)
        question = f"{passage.text}\n\nSummarise the text."
        yield LabelledText(
            id=str(number),
            prompt=f"{question}\nSummary:",
            text=text,
            question=question,
            label=None,
            spans=tuple(spans),
            group=f"planted {number}",
            source=passage.text,
        )


def _retold(passage: Passage, random: Random) -> tuple[str, list[LabelledSpan]]:
    """A retelling, and its hallucinated parts: false values, and values of facts that are not in the passage."""
    missing = list(passage.missing)
    text, spans = "", list[LabelledSpan]()
    for fact in random.sample(passage.stated, TOLD):
        drawn = random.random()
        if drawn < MISSING:
            told, value, wrong = missing.pop(), None, True
        else:
            told, wrong = fact, drawn < MISSING + FALSE
            value = fact.false_value if wrong else None
        before, shown, after = _parts(told, value)
        start = len(text) + (1 if text else 0) + len(before)
        text += (" " if text else "") + before + shown + after
        if wrong:
            spans.append(LabelledSpan(start, start + len(shown)))
    return text, spans


def _parts(fact: Fact, value: str | None) -> tuple[str, str, str]:
    """A sentence for a fact: the text before its value, the value, and the text after it."""
    before, _, after = fact.retold.partition("{value}")
    shown = fact.answers[0] if value is None else value
    if before:
        return before[0].upper() + before[1:], shown, after
    return before, shown[0].upper() + shown[1:], after
