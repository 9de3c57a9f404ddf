"""Where answers to the same prompt differ, word by word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

# words; in scripts that are written without spaces, and for punctuation, each character by itself
_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")

Range = tuple[int, int]


def differences(texts: Sequence[str]) -> list[list[Range]]:
    """The ranges of characters in which texts differ.

    The first text is compared with each of the others. White space alone is no difference.

    Returns:
        For each text, its ranges (start, end) in order. Neighbouring words form one range.
    """
    words = [list(_WORD.finditer(text)) for text in texts]
    differing: list[set[int]] = [set() for _ in texts]
    for number in range(1, len(texts)):
        first, other = ([word.group() for word in words[one]] for one in (0, number))
        matcher = SequenceMatcher(a=first, b=other, autojunk=False)
        for tag, start, end, other_start, other_end in matcher.get_opcodes():
            if tag != "equal":
                differing[0].update(range(start, end))
                differing[number].update(range(other_start, other_end))
    return [_ranges(found, marked) for found, marked in zip(words, differing, strict=True)]


def _ranges(words: Sequence[re.Match[str]], marked: set[int]) -> list[Range]:
    ranges: list[Range] = []
    for number in sorted(marked):
        start, end = words[number].span()
        if number - 1 in marked:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges


def cut(text: str, start: int, ranges: Iterable[Range]) -> list[tuple[str, bool]]:
    """Cut a piece of a text where differences begin and end.

    White space at the end of a difference belongs to the part after it.

    Args:
        text: the piece.
        start: its offset in the whole text.
        ranges: the differences, as offsets in the whole text.

    Returns:
        The parts, each with whether it differs.
    """
    parts: list[tuple[str, bool]] = []
    at = 0
    for low, high in ranges:
        low, high = max(low - start, at), min(high - start, len(text))
        if low < high:
            parts += [(text[at:low], False), (text[low:high], True)]
            at = high
    parts.append((text[at:], False))
    return [part for part in parts if part[0]]
