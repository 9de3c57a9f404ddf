"""Cuts a text into sentences: plain text, Markdown, lists and code. Only the text is read."""

import itertools
import re
from collections.abc import Iterator

from cocoa_engine.risk.words import ENGLISH, Range, words_of

# abbreviations that a name, a number or the rest of the sentence follows
_ABBREVIATIONS = words_of(
    """
    mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt maj cmdr sen rep gov pres vs v al cf eg ie viz no nos nr
    vol pp p fig figs eq eqs ch sec art ed eds est approx ca c inc ltd co corp plc bros dept univ assn mt ft jan feb
    mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun bzw z.b d.h u.a usw m mme mlle sra
    srta sres dra dña lic ing ud uds ee uu abb abs bd hrsg hr
    """
)
# those of them that are written without a capital, and mostly inside a sentence
_INSIDE = words_of("vs cf approx ca viz eg ie bzw vgl geb gest ggf evtl inkl exkl sog bspw bzgl insb núm pág págs")
_TITLES = words_of("mr mrs ms dr prof rev hon gov mme mlle sra srta dra dña lic ing")
_DATES = words_of("mon tue wed thu fri jan feb apr aug sept oct nov dec")  # those that are no other word
_MAY_END = words_of("etc usw al inc ltd co corp plc bros jr sr st no a.m p.m u.s u.k u.n e.u ph.d b.c a.d d.c")
_LINE_MARK = re.compile(
    r"[ \t]*(?:[-*+•‣–][ \t]+|\(?\d{1,3}(?:\.\d{1,3})*[.)][ \t]+|\(?[a-zA-Z][.)][ \t]+(?=[A-Z])|#{1,6}[ \t]|\|)"
)
_CUT_OFF = re.compile(r"[ \t]*\(?(\d{1,3})[.)]")
_FENCE = re.compile(r"[ \t>]*(```+(?=[^`]*$)|~~~+)")
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
_END = re.compile(r"[.!?…‽]+[\"'”’“»›)\]*_]*(?=\s|$)|[。！？｡]+[」』”’）]*|[।॥؟۔։።။។]+")
_WORD_BEFORE = re.compile(r"[^\s(\[\"“‘'*_]+$")
# the number of a day, a century or a king, as German and its neighbours write it
_ORDINAL = re.compile(r"(?<!\w)(?:der|dem|den|des|die|das|am|vom|zum|im|ab|bis|seit|und)\s+\d{1,2}$", re.IGNORECASE)
_WORD_AFTER = re.compile(r"\s*[\"“‘'(\[*_]*(\w[\w'’]*)?")


SHORTEST_WRAPPED = 50
"""The least number of characters of a line that the next one may continue with a capital."""


def sentence_ranges(text: str) -> list[Range]:
    """The sentences of a text, in order. Together they have every character of it but white space between them.

    A line that begins a list item, a heading or a table row begins a sentence; so does a paragraph. A fenced block of
    code is one. A full stop after an abbreviation or an initial, in a number, an address or code ends none.
    """
    sentences: list[Range] = []
    for start, end, is_code in blocks(text):
        bounds = [start] if is_code else [start, *_ends(text, start, end)]
        if bounds[-1] != end:
            bounds.append(end)
        for low, high in itertools.pairwise(bounds):
            if core := text[low:high].strip():
                first = text.index(core, low)
                sentences.append(Range(first, first + len(core)))
    return sentences


def list_marks(text: str) -> list[Range]:
    """The marks at the beginning of lines: bullets, numbers of list items, signs of headings. The number of a list item
    at which the text ends is one too: the number after that of the item before."""
    marks: list[Range] = []
    at, previous = 0, None
    for line in text.splitlines(keepends=True):
        cut_off = _CUT_OFF.fullmatch(line)
        if mark := _LINE_MARK.match(line) or (cut_off if cut_off and int(cut_off[1]) - 1 == previous else None):
            marks.append(Range(at, at + mark.end()))
            number = re.search(r"\d+", mark.group())
            previous = int(number.group()) if number else previous
        at += len(line)
    return marks


def blocks(text: str) -> Iterator[tuple[int, int, bool]]:
    """The paragraphs, list items, headings and fenced blocks of code of a text: start, end, whether it is code."""
    begin = at = 0
    fence: str | None = None
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence is not None:
            if mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                yield begin, at + len(line), True
                begin, fence = at + len(line), None
        elif mark:
            yield begin, at, False
            begin, fence = at, mark[1]
        elif not line.strip() or _LINE_MARK.match(line) or not _continues(text[begin:at], line):
            yield begin, at, False
            begin = at
        at += len(line)
    yield begin, at, fence is not None


def open_fence(text: str) -> str:
    """The line that opens the block of code in which a text ends; empty if it ends in none."""
    *_, (start, _, is_open) = blocks(text)
    return text[start:].splitlines(keepends=True)[0] if is_open else ""


def _continues(before: str, line: str) -> bool:
    """Whether a line continues the sentence of the line before it: a wrapped line, not one of its own."""
    last = before.rstrip()
    if not last or last[-1] in ".!?:。！？":
        return False
    is_wrapped = len(last) - last.rfind("\n") > SHORTEST_WRAPPED and last.lstrip()[0] not in "#|"
    return line.lstrip()[:1].islower() or is_wrapped or last[-1] in ",;"


def _ends(text: str, start: int, end: int) -> list[int]:
    """Where sentences end inside a block."""
    codes = [code.span() for code in _CODE.finditer(text, start, end)]
    mark = _LINE_MARK.match(text, start, end)
    begin = mark.end() if mark else start
    return [
        dot.end()
        for dot in _END.finditer(text, begin, end)
        if not any(low < dot.start() < high for low, high in codes) and not _is_inside(text, dot, begin, end)
    ]


def _is_inside(text: str, mark: re.Match[str], begin: int, end: int) -> bool:
    """Whether the sentence goes on after a mark: after an abbreviation, or where a small letter follows."""
    after = _WORD_AFTER.match(text, mark.end(), end)
    following = (after[1] if after else None) or ""
    alone = mark.group() in ("!", "?") or mark.group()[0] in "。！？｡।॥؟۔։።။។"
    if following[:1].islower() and not alone:
        return True
    return mark.group()[0] == "." and _is_abbreviation(text, mark, begin, following)


def _is_abbreviation(text: str, dot: re.Match[str], begin: int, following: str) -> bool:
    """Whether a full stop belongs to an abbreviation or an initial, and the word after it to the same sentence."""
    before = _WORD_BEFORE.search(text, begin, dot.start())
    if len(dot.group()) > 1 or before is None or not following:
        return False
    word = before.group().rstrip(".")
    if word.lower() in _MAY_END or _has_short_letters(word):
        return following.lower() not in ENGLISH or word.lower() in ("e.g", "i.e")
    if len(word) == 1 and word.isalpha() and (word.isascii() or word.isupper()) and word != "I":
        return following.lower() not in ENGLISH  # an initial, or one letter of "z. B."
    if word.isdigit() and _ORDINAL.search(text, begin, dot.start()):
        return following.lower() not in ENGLISH
    if word.lower() in ("no", "art", "fig", "vol", "p", "pp", "ch", "sec", "nr", "nos"):
        return following[:1].isdigit()
    if word.lower() in _TITLES:
        return not word.islower()
    is_abbreviation = word.lower() in _ABBREVIATIONS and not word.islower()
    return (is_abbreviation and following.lower() not in ENGLISH) or word in _INSIDE


def _has_short_letters(word: str) -> bool:
    """Whether a word is an abbreviation with inner full stops, such as U.S or e.g, and no name of a file."""
    parts = word.split(".")
    return len(parts) > 1 and all(part.isalpha() and len(part) <= 2 for part in parts)


def ends_in_abbreviation(text: str, start: int, dot: int) -> bool:
    """Whether the full stop at the end of a sentence belongs to its last word too."""
    before = _WORD_BEFORE.search(text, start, dot)
    word = before.group() if before else ""
    if _has_short_letters(word) or word in _INSIDE or word in ("etc", "usw", "al"):
        return True
    is_listed = word.lower() in _TITLES | _MAY_END | _DATES and word.lower() != "no"  # "No." is mostly an answer
    return (is_listed and not word.islower()) or (len(word) == 1 and word.isupper() and word != "I")
