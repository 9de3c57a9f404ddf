"""Finds the claims of a text: its names, numbers, dates, short quotations and content words. Only the text is read."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from cocoa_engine.risk.sentences import list_marks, sentence_ranges
from cocoa_engine.risk.words import FunctionWords, Range, word_ranges, words_of

ClaimKind = Literal["name", "number", "date", "quote", "word"]

MOST_QUOTED = 6  # words; a longer quotation is divided into its own claims

_MONTHS = words_of(
    """
    january february march april may june july august september october november december jan feb mar apr jun jul
    aug sep sept oct nov dec
    """
)
_NUMBERS = words_of(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion
    dozen half third quarter first second twice percent
    """
)
_SCALES = words_of("hundred thousand million billion trillion bn m k percent % pc")
_IN_NAMES = words_of("of de del della der den di da do dos du la le van von y bin ibn al & the")
_QUOTES = re.compile(r"\"([^\"\n]+)\"|“([^”\n]+)”|«([^»\n]+)»|「([^」\n]+)」|『([^』\n]+)』|„([^“”\n]+)[“”]")
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}")
_SPACES = (" ", "\u00a0")
_BETWEEN_IN_DATE = re.compile(r"[ \u00a0]|, ?|\. ")


class ClaimRange(NamedTuple):
    """A claim: its offsets in the text, and what it is."""

    start: int
    end: int
    kind: ClaimKind


class _Word(NamedTuple):
    start: int
    end: int
    text: str
    gap: str  # what stands between it and the word before it


def claim_ranges(text: str, cuts: Iterable[int] = ()) -> list[ClaimRange]:
    """The claims of a text, in order, none of them overlapping. Punctuation and function words are in none alone."""
    marks = list_marks(text)
    ranges = [
        word
        for word in word_ranges(text, cuts)
        if not any(mark.start <= word.start and word.end <= mark.end for mark in marks)
    ]
    befores = [0, *(word.end for word in ranges[:-1])]
    words = [_Word(*word, text[slice(*word)], text[at : word.start]) for at, word in zip(befores, ranges, strict=False)]
    functional = FunctionWords([word.text for word in words])
    starts = {sentence.start for sentence in sentence_ranges(text)} | {mark.end for mark in marks}
    quotes: dict[int, tuple[int, int]] = {}  # by the start of the first word: the end of the last one, their number
    for match in _QUOTES.finditer(text):
        start, end = match.span(match.lastindex or 0)
        inside = [word for word in words if start <= word.start and word.end <= end]
        if 0 < len(inside) <= MOST_QUOTED:
            quotes[inside[0].start] = inside[-1].end, len(inside)
    claims: list[ClaimRange] = []
    number = 0
    while number < len(words):
        start = words[number].start
        if start in quotes:
            end, count = quotes[start]
            claims.append(ClaimRange(start, end, "quote"))
            number += count
            continue
        kind, following = _claim(words, number, functional, _begins(text, start, starts))
        if kind is not None:
            claims.append(ClaimRange(start, words[following - 1].end, kind))
        number = following
    return claims


def content_words(text: str) -> list[Range]:
    """The words of the claims of a text, in order, without function words inside names.

    A run of a script that is written without spaces is one word.
    """
    words, claims = word_ranges(text), claim_ranges(text)
    functional = FunctionWords([text[start:end] for start, end in words])
    return [
        word
        for word in words
        if any(
            claim.start <= word.start < claim.end
            and (claim.kind == "quote" or text[word.start : word.end] not in functional)
            for claim in claims
        )
    ]


def _begins(text: str, start: int, starts: set[int]) -> bool:
    """Whether a word is the first of its sentence, so that its capital says nothing."""
    while start and not text[start - 1].isspace() and start not in starts:
        start -= 1
    return start in starts


def _claim(words: Sequence[_Word], first: int, functional: FunctionWords, begins: bool) -> tuple[ClaimKind | None, int]:
    """What claim begins at a word, if one does, and the number of the word after it."""
    word = words[first].text
    if (end := _date_end(words, first)) > first:
        return "date", end
    end = first + 1
    if any(unicodedata.category(character) in ("Nd", "No", "Nl") for character in word):
        while end < len(words) and words[end].gap in ("", *_SPACES) and words[end].text.lower() in _SCALES:
            end += 1
        return "number", end
    if word in functional or (begins and word.lower() in functional):
        return None, end
    if not word[0].isupper():
        return "number" if word.lower() in _NUMBERS else "word", end
    end = _name_end(words, first, functional)
    return "word" if begins and end == first + 1 and not word[1:].isupper() else "name", end


def _date_end(words: Sequence[_Word], first: int) -> int:
    """The number of the word after a date that begins at a word; the word's own number if none begins there."""
    if _DATE.fullmatch(words[first].text):
        return first + 1
    end, months, numbers = first, 0, 0
    while end < min(len(words), first + 4):
        part = words[end].text
        if end > first and not _BETWEEN_IN_DATE.fullmatch(words[end].gap):
            break
        if part.lower() in _MONTHS and part[0].isupper() and not months:
            months += 1
        elif re.fullmatch(r"\d{1,2}(?:st|nd|rd|th)?|\d{4}", part) and numbers < 2:
            numbers += 1
        elif not (part == "of" and numbers and not months):
            break
        end += 1
    while end > first and words[end - 1].text == "of":
        end -= 1
    return end if months and numbers else first


def _name_end(words: Sequence[_Word], first: int, functional: FunctionWords) -> int:
    """The number of the word after a name: capitals in a row, with ``of`` and the like only between them."""
    end = first + 1
    while end < len(words):
        reach = end
        while reach < min(len(words), end + 2) and _joins_name(words, reach):
            if words[reach].text.lower() not in _IN_NAMES or words[reach].text[0].isupper():
                break
            reach += 1
        if reach >= len(words) or not _joins_name(words, reach):
            break
        word = words[reach].text
        if not word[0].isupper() or (word in functional and reach == end):
            break
        end = reach + 1
    return end


def _joins_name(words: Sequence[_Word], number: int) -> bool:
    """Whether a word may belong to the name before it: after a space, ``&``, or an initial's or a title's full stop."""
    gap, before = words[number].gap, words[number - 1].text
    is_initial = len(before) == 1 or before in ("Mr", "Mrs", "Ms", "Dr", "St", "Prof", "Jr", "Sr")
    return gap in (*_SPACES, " & ") or (gap in (". ", ".") and is_initial)
