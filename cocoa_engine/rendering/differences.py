"""Where answers to the same prompt differ, word by word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

# words; but each character of a script that is written without spaces, and each sign, by itself
_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")

Range = tuple[int, int]


def differences(texts: Sequence[str]) -> list[list[Range]]:
    """Of each text, the ranges of characters that differ: of the first what another lacks, of those what it lacks.

    White space alone is no difference.

    Returns:
        For each text the ranges (start, end), in order; neighbouring words are one range.
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
    """A piece of a text that begins at ``start``, cut where differences begin and end: parts, and whether they differ.

    White space at the end of a difference belongs to what follows.
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
