"""Where something is written into a text: references at the end of clauses, marks around words.

Only the text is read.
"""

import itertools
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from cocoa_engine.risk.claims import content_words
from cocoa_engine.risk.sentences import blocks, ends_in_abbreviation, list_marks, open_fence, sentence_ranges
from cocoa_engine.risk.words import Range, word_ranges

# what no clause ends inside of: code, formulas, links, tags, entities, quotations, brackets
_WHOLE = re.compile(
    r"""(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)
    | \$\$(?:(?!\$\$).)+\$\$ | (?<![\w$])\$(?=[^\s$])[^$\n]*(?<=\S)\$(?![\w$])
    | \\\[(?:(?!\\\]).)+\\\] | \\begin\{(?P<name>\w+\*?)\}.*?\\end\{(?P=name)\} | \\\((?:(?!\\\)).)+\\\)
    | !?\[[^\[\]\n]*\]\([^()\n]*\)
    | <[^<>\s][^<>\n]*> | &\#?\w+;
    | “[^“”\n]*” | „[^„“”\n]*[“”] | «[^«»\n]*» | »[^«»\n]*« | ‹[^‹›\n]*› | 「[^「」\n]*」 | 『[^『』\n]*』
    | ‘(?:[^‘’\n]|’(?=\w))*’
    | (?<![\w"])"(?=\S)[^"\n]*(?<=\S)"(?!\w)
    | (?<![\w'])'(?=[^\W\d])(?:[^'\n]|(?<=\w)'(?=\w))*(?<=[\w.!?,])'(?!\w)
    | \([^()\n]*\) | （[^（）\n]*）""",
    re.VERBOSE | re.DOTALL,
)
# what no mark begins or ends inside of: code, formulas, tags, footnotes, addresses of links. A stream waits for the end
# of code, a formula or a tag on its line, so each has at most 100 characters. A formula on lines of its own ends at an
# empty line too.
_ADDRESS = r"\(\s?(?:[^()\s]|\([^()\s]*\))*(?:\s+\"[^\"\n]{0,100}\")?\s?\)"
_AMOUNT = r"\d[\d.,]*(?:[kKmMbB]n?)?[.,;:!?)]*\s+(?:[A-Za-z]{2}|a\s)"  # of money: "$5 for"
_DISPLAY = r"""(?:^[ \t>]*(?P<dollars>\$\$)(?!\$)|(?<=\s)(?P<end_dollars>\$\$)(?=[ \t]*\n)
    |(?P<bracket>\\\[)|\\begin\{(?P<name>\w+\*?)\})
    .*?(?:(?P<closed>(?(name)\\end\{(?P=name)\}|(?(bracket)\\\]|\$\$)))|\n[ \t]*(?=\n)|\Z)"""
_INLINE = re.compile(
    rf"""(?P<ticks>`+)(?!`)[^\n]{{0,100}}?(?<!`)(?P=ticks)(?!`) | (?P<display>{_DISPLAY})
    | \$\$[^$\n]{{1,100}}\$\$ | (?<![\w$])\$(?=[^\s$])(?!{_AMOUNT})[^$\n]{{0,100}}(?<=\S)\$(?![\w$])
    | \\\([^\n]{{0,100}}?\\\)
    | !?\[(?P<label>[^\[\]`$<\n]{{0,100}})\]{_ADDRESS} | (?P<address>(?<=\]){_ADDRESS})
    | (?P<tag><[^<>\s][^<>\n]{{0,100}}> | <[^<>\s]+> | \[\^[^\[\]\s]{{1,40}}\])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_OPEN = re.compile(
    rf"(?:`|\$(?!{_AMOUNT})(?=\S|\Z)|\\\(|<[^<>\s])(?=.{{0,100}}\Z)|<[^<>\s]*\Z|\\\Z"
    r"|\](?:\(\s?[^()\s]*(?:\([^()\s]*\)?)?[^()\s]*(?:\s+\"[^\"\n]{0,100})?)?\Z"
)
_SEMICOLON = re.compile(r"(?P<entity>&\#?\w+;)|;(?=\s)|[；；؛]")
_ROW = re.compile(r"^[ \t]*\|.*", re.MULTILINE)
# a line with a pipe, a line of dashes and pipes, and the lines with pipes after it
_TABLE = re.compile(r"^[^\n|]*\|.*\n(?=.*\|)[ \t|:]*-[ \t|:-]*\r?$(?:\n[^\n|]*\|.*)*", re.MULTILINE)
_LINE = re.compile(r".+")
_FENCE = re.compile(r"^[ \t>]*(?:`{3,}|~{3,})", re.MULTILINE)
_PIPE = re.compile(r"(?<!\\)\|")
_ALONE = re.compile(r"(?:[\W_]+\s)?(\S.*?)(?:\s[\W_]+)?", re.DOTALL)  # signs without a word at the ends of a part
_FINAL = frozenset(".!?…‽。！？｡।॥؟۔։።។:;,；：，、؛،\\")


class Clause(NamedTuple):
    """A sentence, a part of one that ends in a semicolon, a cell of a table, or a fenced block of code.

    Attributes:
        start, end: offset of its first character, and after its last one.
        place: where a reference stands: before the punctuation at its end, or behind that of an abbreviation.
        is_code: whether it is a block of code, in which no reference can stand.
        words: its content words; all its words, marks of lists left out, if it has none.
    """

    start: int
    end: int
    place: int
    is_code: bool
    words: Sequence[Range]


def clauses(text: str) -> list[Clause]:
    """The clauses of a text, in order. None ends inside code, a quotation, brackets or a link."""
    code, plain = _without_code(text)
    whole = [Range(*match.span()) for match in _WHOLE.finditer(plain)]
    rows = [Range(*match.span()) for match in _ROW.finditer(plain)]
    rows += [Range(*line.span()) for table in _TABLE.finditer(plain) for line in _LINE.finditer(plain, *table.span())]
    ends, pipes, entities = _cuts(text)
    ends = {end for end in ends if not _is_inside(end, rows)} | {at for row in rows for at in row}
    ends |= {at for at in pipes if any(row.start <= at <= row.end for row in rows)}
    ends.update(at for block in code for at in block)
    ends = {end for end in ends if not _is_inside(end, whole + code)}
    bounds = list(_stripped(text, sorted({0, *ends, len(text)})))
    marks, begins = list_marks(text), [start for start, _ in bounds]
    others = [word for word in word_ranges(text) if not any(mark.start <= word.start < mark.end for mark in marks)]
    by_clause = _grouped(content_words(text), begins), _grouped(others, begins)
    clauses: list[Clause] = []
    for (start, end), content, words in zip(bounds, *by_clause, strict=True):
        is_code = any(block.start <= start < block.end for block in code)
        place = end if is_code else _place(text, start, end, entities)
        clauses.append(Clause(start, end, place, is_code, content or words))
    return clauses


def _grouped(words: Sequence[Range], begins: Sequence[int]) -> list[list[Range]]:
    """The words by the clause in which they begin."""
    groups: list[list[Range]] = [[] for _ in begins]
    for word in words:
        groups[bisect_right(begins, word.start) - 1].append(word)
    return groups


def _cuts(text: str) -> tuple[set[int], set[int], set[int]]:
    """Where sentences and their parts before semicolons end, the edges of pipes, and the ends of entities."""
    semicolons = {match.end(): bool(match["entity"]) for match in _SEMICOLON.finditer(text)}
    entities = {end for end, is_entity in semicolons.items() if is_entity}
    ends = {sentence.end for sentence in sentence_ranges(text)} | semicolons.keys() - entities
    return ends, {at for pipe in _PIPE.finditer(text) for at in pipe.span()}, entities


def _without_code(text: str) -> tuple[list[Range], str]:
    """The blocks of code, and the text with empty lines in their place: what these contain begins no quotation and no
    formula."""
    code = [Range(start, end) for start, end, is_code in blocks(text) if is_code]
    for start, end in code:
        text = text[:start] + "\n" * (end - start) + text[end:]
    return code, text


def _is_inside(offset: int, ranges: list[Range]) -> bool:
    return any(part.start < offset < part.end for part in ranges)


def _stripped(text: str, bounds: list[int]) -> Iterator[tuple[int, int]]:
    """The parts between the bounds, without white space at their ends; none without characters."""
    for low, high in itertools.pairwise(bounds):
        if part := text[low:high].strip():
            start = text.index(part[0], low)
            yield start, start + len(part)


def _place(text: str, start: int, end: int, entities: set[int]) -> int:
    """Where a reference stands in a clause; ``entities`` are the ends of those."""
    at = end
    while at > start and at not in entities and (text[at - 1] in _FINAL or text[at - 1].isspace()):
        at -= 1
    is_abbreviation = text[at:end] == "." and ends_in_abbreviation(text, start, at)
    return end if is_abbreviation or at == start else at


class Stretch(NamedTuple):
    """A part of a text that is marked.

    Attributes:
        start, end: offset of its first character, and after its last one.
        numbers: the numbers of the given ranges that it has characters of.
        is_code: whether it is what a mark would break: code, a formula, a tag, the address of a link.
    """

    start: int
    end: int
    numbers: list[int]
    is_code: bool = False


def marked_stretches(text: str, ranges: Sequence[tuple[int, int]], *, with_code: bool = False) -> list[Stretch]:
    """The parts of a text that are marked for ranges of it, in order.

    A part is on one line, in one cell of a table and in one clause, outside blocks of code, tags, addresses of links
    and marks of lists and headings. It ends neither inside code or a formula nor in punctuation that ends a clause. It
    has words as a whole; ranges without a word have none. Parts that touch are one. A line with a pipe has cells.

    Args:
        text: any text.
        ranges: ranges of the text, in order. They may end inside words.
        with_code: whether to add the other parts of the ranges that have words or signs such as arrows, by line.
    """
    words = word_ranges(text, (at for part in ranges for at in part))
    words = every = [word for word in words if any(map(str.isalnum, text[word.start : word.end]))]
    code, plain = _without_code(text)
    matches = list(_INLINE.finditer(plain))
    inline = [Range(*match.span()) for match in matches if match["label"] is None]
    tags = [Range(*match.span()) for match in matches if match["tag"] or match["address"] or match["display"]]
    for match in (match for match in matches if match["label"] is not None):  # whose label may have a mark inside
        tags += [Range(match.start(), match.start("label")), Range(match.end("label"), match.end())]
    words = [word for word in words if not any(tag.start <= word.start < tag.end for tag in tags)]
    ends = [word.end for word in words]
    marks = list_marks(text)
    cuts, pipes, entities = _cuts(text)
    cuts = {cut for cut in cuts | pipes if not _is_inside(cut, inline)} | {at for tag in tags for at in tag}
    stretches: list[Stretch] = []
    for number, (begin, stop) in enumerate(ranges):
        for low, high in _written(text, begin, stop, cuts | _unpaired(text, begin, stop), code):
            low = max([low, *(mark.end for mark in marks if mark.start < high and low < mark.end)])
            first = bisect_right(ends, low)
            last = bisect_left(words, high, key=itemgetter(0)) - 1
            if last < first or low >= high:
                continue
            start, end = min(low, words[first].start), max(high, words[last].end)
            start = max([start, *(part.end for part in inline if part.start < start < part.end)])
            end = min([end, *(part.start for part in inline if part.start < end < part.end)])
            if not any(map(str.isalnum, text[start:end])):
                continue
            start += len(text[start:end]) - len(text[start:end].lstrip())
            end = max(_place(text, start, end, entities), min(words[last].end, end))
            end = start + len(text[start:end].rstrip())
            alone = _ALONE.fullmatch(text, start, end)  # such as the beginning of emphasis
            start, end = alone.span(1) if alone else (start, end)
            _add(stretches, Stretch(start, end, [number]))
    if not with_code:
        return stretches
    rest: list[Stretch] = []
    taken = [*marks, *(Range(*match.span()) for match in _FENCE.finditer(text))]
    taken += [Range(stretch.start, stretch.end) for stretch in stretches]
    for number, (begin, stop) in enumerate(ranges):
        bounds = {begin, stop, *(at for part in taken for at in part if begin < at < stop)}
        bounds |= {at + 1 for at in range(begin, stop) if text[at] == "\n"}
        for start, end in _stripped(text, sorted(bounds)):
            if any(part.start <= start < part.end for part in taken):
                continue
            edges = [(word.start, word.end) for word in every if word.start < end and start < word.end]
            start = min([start, *(word[0] for word in edges)])
            end = max([end, *(word[1] for word in edges)])
            _add(rest, Stretch(start, end, [number], is_code=True))
    # a letter, a digit, or a sign such as an arrow or a tick, and no punctuation
    said = {char for char in text if char.isalnum() or (not char.isascii() and unicodedata.category(char)[0] == "S")}
    return sorted([*stretches, *(part for part in rest if not said.isdisjoint(text[part.start : part.end]))])


def _add(stretches: list[Stretch], new: Stretch) -> None:
    """Add a part to those before it, or to the last of them if it touches it."""
    if stretches and new.start <= stretches[-1].end:
        last = stretches.pop()
        new = new._replace(start=last.start, end=max(last.end, new.end), numbers=[*last.numbers, *new.numbers])
    stretches.append(new)


def open_inline(line: str) -> int:
    """Where code or a tag begins that the rest of a line may close; the length of the line if nothing is open."""
    opened = _OPEN.search(_INLINE.sub(lambda match: " " * len(match[0]), line))
    return opened.start() if opened else len(line)


def open_block(text: str) -> str:
    """The line that opens the block of code or the formula in which a text ends; empty if it ends in none."""
    if fence := open_fence(text):
        return fence
    *_, last = [None, *_INLINE.finditer(_without_code(text)[1])]
    if last is None or not last["display"] or last["closed"] or last.end() < len(text):
        return ""
    opening = last["dollars"] or last["end_dollars"] or last["bracket"] or f"\\begin{{{last['name']}}}"
    return f"{opening}\n"


def _unpaired(text: str, begin: int, stop: int) -> set[int]:
    """The edges of the square brackets of a range whose partner is not in it. It may be the label of a link."""
    opened, alone = list[int](), list[int]()
    for bracket in re.compile(r"[\[\]]").finditer(text, begin, stop):
        if bracket[0] == "[":
            opened.append(bracket.start())
        elif opened:
            opened.pop()
        else:
            alone.append(bracket.start())
    return {edge for at in opened + alone for edge in (at, at + 1)}


def _written(text: str, begin: int, stop: int, cuts: set[int], code: list[Range]) -> Iterator[tuple[int, int]]:
    """The parts of a range by line and cut, without white space at their ends; none in blocks of code."""
    while begin < stop:
        line, end = text.rfind("\n", 0, begin) + 1, text.find("\n", begin, stop)
        end = stop if end < 0 else end
        bounds = {begin, end, *(at for at in cuts if begin < at < end)}
        if not _FENCE.match(text, line) and not any(block.start <= begin < block.end for block in code):
            yield from _stripped(text, sorted(bounds))
        begin = end + 1
