"""Cuts a text into words, for any script. Only the text is read; offsets are in characters."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """A part of a text: offset of its first character, and the offset after its last one."""

    start: int
    end: int


def words_of(listed: str) -> frozenset[str]:
    """The words of a list that is written as text."""
    return frozenset(listed.split())


_ADDRESS = re.compile(r"(?:https?://|www\.)[^\s<>\"'`]+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_AFTER_ADDRESS = ".,;:!?)]}'\"*_"
# scripts that are written without spaces: Thai, Lao, Myanmar, Khmer, kana, Chinese characters
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)
_BETWEEN_ALL = frozenset("'’ʼ-‐‑_&@·\u200c\u200d\u00ad")
_BETWEEN_DIGITS = frozenset(".,:/–")
_AFTER_DIGITS = frozenset("%‰°")


def word_ranges(text: str, cuts: Iterable[int] = ()) -> list[Range]:
    """The words of a text, in order, without the punctuation around them.

    A number with its sign, currency and per cent is one word, as is an address, a hyphenated word, or an abbreviation
    with inner full stops. A run of a script that is written without spaces is cut at ``cuts``.

    Args:
        text: any text.
        cuts: offsets at which a run without spaces may be cut, such as the ends of its tokens.
    """
    allowed = sorted(set(cuts))
    ranges: list[Range] = []
    at = 0
    for address in _ADDRESS.finditer(text):
        end = address.start() + len(address.group().rstrip(_AFTER_ADDRESS))
        if address.start() < at or end == address.start():
            continue
        ranges += _words(text, at, address.start(), allowed)
        ranges.append(Range(address.start(), end))
        at = end
    return [*ranges, *_words(text, at, len(text), allowed)]


def _words(text: str, begin: int, end: int, cuts: list[int]) -> list[Range]:
    """The words of a part of a text that has no address."""
    ranges: list[Range] = []
    at = begin
    while at < end:
        if not _is_letter(text[at]):
            at += 1
            continue
        stop = at + 1
        while stop < end and (_is_letter(text[stop]) or _joins(text, stop, end)):
            stop += 1
        start, after = _with_signs(text, at, stop, begin, end)
        ranges += _pieces(text, start, after, cuts)
        at = after
    return ranges


def _is_letter(character: str) -> bool:
    """Whether a character belongs to words: a letter, a digit, or a mark of one."""
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def _joins(text: str, at: int, end: int) -> bool:
    """Whether a character that is no letter is inside a word."""
    if at + 1 >= end or not _is_letter(text[at + 1]):
        return False
    before, after = text[at - 1], text[at + 1]
    if text[at] in _BETWEEN_ALL:
        return _is_letter(before)
    if text[at] in _BETWEEN_DIGITS and before.isdigit() and after.isdigit():
        return True
    # U.S., e.g., file.py, but not the end of a sentence that lacks a space
    return text[at] == "." and before.isalnum() and (before.isupper() or after.islower() or after.isdigit())


def _with_signs(text: str, start: int, stop: int, begin: int, end: int) -> tuple[int, int]:
    """A word with its currency, sign or per cent."""
    if text[start].isdigit():
        if start > begin and unicodedata.category(text[start - 1]) == "Sc":
            start -= 1
        if start > begin and text[start - 1] in "-−+" and (start - 1 == begin or text[start - 2].isspace()):
            start -= 1
    if (
        stop < end
        and text[stop - 1].isdigit()
        and (text[stop] in _AFTER_DIGITS or unicodedata.category(text[stop]) == "Sc")
    ):
        stop += 1
    if text[start:stop].isalpha() and stop - start == 1:  # C++, C#, F#
        while stop < end and text[stop] in "+#":
            stop += 1
    return start, stop


def _pieces(text: str, start: int, end: int, cuts: list[int]) -> list[Range]:
    """A word as it is, or cut where it is of a script without spaces."""
    if not (run := _UNSPACED.search(text, start, end)):
        return [Range(start, end)]
    bounds = {start, end, run.start(), run.end()}
    while run:
        bounds |= {run.start(), run.end(), *(cut for cut in cuts if run.start() < cut < run.end())}
        run = _UNSPACED.search(text, run.end(), end)
    ordered = sorted(bounds)
    return [Range(low, high) for low, high in itertools.pairwise(ordered)]


def is_unspaced(word: str) -> bool:
    """Whether a word is of a script that is written without spaces."""
    return bool(_UNSPACED.match(word))
