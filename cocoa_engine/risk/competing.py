"""What other candidates of a span say in place of a claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from cocoa_engine.risk.unit import Part, Unit
from cocoa_engine.risk.words import Range, word_ranges

MOST = 3


def competing(text: str, parts: Sequence[Part], claim: Unit, offset: int = 0) -> list[str]:
    """The words that other candidates have in place of a claim, in the order of their candidates, each once.

    A candidate that says the same there, or nothing, adds none. Words at the end of a candidate may be cut;
    they are followed by ``…``.

    Args:
        text: the text of the answer.
        parts: its spans.
        claim: a claim with offsets in the text of the spans.
        offset: the offset of ``text`` in the text of the spans.
    """
    found: list[str] = []
    for number in claim.spans:
        part = parts[number]
        begin = min(claim.start, part.start)
        before = text[begin - offset : part.start - offset]
        own = before + text[part.start - offset : part.end - offset]
        claimed = Range(claim.start - begin, min(claim.end, part.end) - begin)
        for index, rival in enumerate(part.candidates):
            if index != part.chosen:
                found += _counterpart(own, before + rival.text, claimed)
    return list(dict.fromkeys(found))[:MOST]


def _counterpart(own: str, other: str, claimed: Range) -> Iterator[str]:
    """The words of ``other`` that stand for the range ``claimed`` of ``own``, if they differ."""
    words, others = word_ranges(own), word_ranges(other)
    inside = [number for number, word in enumerate(words) if word.start < claimed.end and word.end > claimed.start]
    if not inside:
        return
    first, last = inside[0], inside[-1] + 1
    texts = ([own[word.start : word.end] for word in words], [other[word.start : word.end] for word in others])
    matcher = SequenceMatcher(None, *texts, autojunk=False)
    low, high, differs = len(others), 0, False
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if start >= last or end <= first:
            continue
        if tag == "equal":  # the part of the match inside the claim, at the same distance
            other_start, other_end = other_start + max(first - start, 0), other_end - max(end - last, 0)
        elif tag == "replace":
            differs = True
            if end > last:  # the claim is the beginning of what was replaced
                other_end = min(other_end, other_start + max(last - start, 1))
            if start < first:
                other_start = min(other_start + first - start, other_end)
        else:
            continue
        low, high = min(low, other_start), max(high, other_end)
    if differs and low < high:
        cut = others[high - 1].end == len(other)
        yield other[others[low].start : others[high - 1].end] + ("…" if cut else "")
