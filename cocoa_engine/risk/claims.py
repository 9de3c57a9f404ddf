"""Finds the claims of a text: its names, numbers, dates, short quotations and content words. Only the text is read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

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
_BETWEEN_IN_DATE = re.compile(r"[ \u00a0]|, ?|\. ")


@dataclass(frozen=True)
class ClaimRange:
    """A claim: its offsets in the text, and what it is."""

    start: int
    end: int
    kind: ClaimKind


def claim_ranges(text: str, cuts: Iterable[int] = ()) -> list[ClaimRange]:
    """The claims of a text, in order, none of them overlapping. Punctuation and function words are in none alone.

    Args:
        text: any text.
        cuts: as in :func:`.word_ranges`.
    """
    marks = list_marks(text)
    words = [
        word
        for word in word_ranges(text, cuts)
        if not any(mark.start <= word.start and word.end <= mark.end for mark in marks)
    ]
    functional = FunctionWords([text[word.start : word.end] for word in words])
    starts = {sentence.start for sentence in sentence_ranges(text)} | {mark.end for mark in marks}
    quoted = list(_quotations(text, words))
    claims: list[ClaimRange] = []
    number = 0
    while number < len(words):
        quote = next((one for one in quoted if one.start == words[number].start), None)
        if quote is not None:
            claim: ClaimRange | None = ClaimRange(quote.start, quote.end, "quote")
            following = next(
                (later for later in range(number, len(words)) if words[later].start >= quote.end), len(words)
            )
        else:
            claim, following = _claim(text, words, number, functional, _begins(text, words[number], starts))
        if claim is not None:
            claims.append(claim)
        number = following
    return claims


def content_words(text: str) -> list[Range]:
    """The words of the claims of a text, in order, without function words inside names.

    A run of a script that is written without spaces is one word.

    Args:
        text: any text.
    """
    words, claims = word_ranges(text), claim_ranges(text)
    functional = FunctionWords([_of(text, word) for word in words])
    return [
        word
        for word in words
        if any(
            claim.start <= word.start < claim.end and (claim.kind == "quote" or _of(text, word) not in functional)
            for claim in claims
        )
    ]


def _quotations(text: str, words: Sequence[Range]) -> Iterator[Range]:
    """The short quotations of a text, without their marks, from first to last word."""
    for match in _QUOTES.finditer(text):
        group = next(number for number in range(1, 7) if match[number] is not None)
        inside = [word for word in words if match.start(group) <= word.start and word.end <= match.end(group)]
        if 0 < len(inside) <= MOST_QUOTED:
            yield Range(inside[0].start, inside[-1].end)


def _begins(text: str, word: Range, starts: set[int]) -> bool:
    """Whether a word is the first of its sentence, so that its capital says nothing."""
    before = word.start
    while before and not text[before - 1].isspace() and before not in starts:
        before -= 1
    return before in starts


def _claim(
    text: str, words: Sequence[Range], first: int, functional: FunctionWords, begins: bool
) -> tuple[ClaimRange | None, int]:
    """The claim that begins at a word, if one does, and the number of the word after it."""
    word = _of(text, words[first])
    if (end := _date_end(text, words, first)) > first:
        return ClaimRange(words[first].start, words[end - 1].end, "date"), end
    if _is_number(word):
        end = first + 1
        while end < len(words) and _adjacent(text, words, end) and _of(text, words[end]).lower() in _SCALES:
            end += 1
        return ClaimRange(words[first].start, words[end - 1].end, "number"), end
    if word in functional or (begins and word.lower() in functional):
        return None, first + 1
    if not _is_capital(word):
        if word.lower() in _NUMBERS:
            return ClaimRange(*words[first], "number"), first + 1
        return ClaimRange(*words[first], "word"), first + 1
    end = _name_end(text, words, first, functional)
    kind: ClaimKind = "word" if begins and end == first + 1 and not word[1:].isupper() else "name"
    return ClaimRange(words[first].start, words[end - 1].end, kind), end


def _of(text: str, word: Range) -> str:
    return text[word.start : word.end]


def _is_number(word: str) -> bool:
    return any(unicodedata.category(character) in ("Nd", "No", "Nl") for character in word)


def _is_capital(word: str) -> bool:
    return word[0].isupper()


def _adjacent(text: str, words: Sequence[Range], number: int) -> bool:
    """Whether one space, or nothing, stands before a word and after the word before it."""
    return text[words[number - 1].end : words[number].start] in ("", " ", "\u00a0")


def _date_end(text: str, words: Sequence[Range], first: int) -> int:
    """The number of the word after a date that begins at a word; the word's own number if none begins there."""
    word = _of(text, words[first])
    if _DATE.fullmatch(word):
        return first + 1
    end, months, numbers = first, 0, 0
    while end < len(words) and end < first + 4:
        part = _of(text, words[end])
        between = text[words[end - 1].end : words[end].start] if end > first else " "
        if not _BETWEEN_IN_DATE.fullmatch(between):
            break
        if part.lower() in _MONTHS and part[0].isupper() and not months:
            months += 1
        elif re.fullmatch(r"\d{1,2}(?:st|nd|rd|th)?|\d{4}", part) and numbers < 2:
            numbers += 1
        elif not (part == "of" and numbers and not months):
            break
        end += 1
    while end > first and _of(text, words[end - 1]) == "of":
        end -= 1
    return end if months and numbers else first


def _name_end(text: str, words: Sequence[Range], first: int, functional: FunctionWords) -> int:
    """The number of the word after a name: capitals in a row, with ``of`` and the like only between them."""
    end = first + 1
    while end < len(words):
        reach = end
        while reach < len(words) and reach < end + 2 and _adjacent_in_name(text, words, reach):
            if _of(text, words[reach]).lower() not in _IN_NAMES or _is_capital(_of(text, words[reach])):
                break
            reach += 1
        if reach >= len(words) or not _adjacent_in_name(text, words, reach):
            break
        word = _of(text, words[reach])
        if not _is_capital(word) or (word in functional and reach == end):
            break
        end = reach + 1
    return end


def _adjacent_in_name(text: str, words: Sequence[Range], number: int) -> bool:
    """As :func:`_adjacent`; the full stop of an initial or a title, and ``&``, may stand between too."""
    between = text[words[number - 1].end : words[number].start]
    before = _of(text, words[number - 1])
    is_initial = len(before) == 1 or before in ("Mr", "Mrs", "Ms", "Dr", "St", "Prof", "Jr", "Sr")
    return between in (" ", "\u00a0", " & ") or (between == ". " and is_initial) or (between == "." and is_initial)
