"""Changes of the text of an answer, and the offsets of its report that follow them.

A report lists the changes of its text under ``edits``, with offsets in the original. All other offsets refer to the
text that is shown. A step begins with the original and all changes, so that the order of steps does not matter.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from cocoa_engine.errors import ConfigError
from cocoa_engine.report import EditReport, RangeReport, RiskReport, SpanReport
from cocoa_integrations._shared.reasoning import Replaced, spliced

Entry = TypeVar("Entry", bound=RangeReport)
Edit = EditReport
"""A change of a stretch of a text, in which a marker is inserted if it has no characters."""


class Change(NamedTuple):
    """The text of an answer after a step, all changes of the original, and what moves entries.

    ``moved(entries, shift=0)`` copies them; ``shift`` is from their offsets to those of spans.
    """

    text: str
    edits: Sequence[Edit]
    moved: Callable[..., list[Any]]

    def of_report(self, report: RiskReport) -> RiskReport:
        def moved(entries: Mapping[str, Any]) -> dict[str, Any]:
            return dict(zip(entries, self.moved(entries.values()), strict=True))

        lists = report.model_fields_set & {"spans", "check", "claims", "sentences", "parts"}
        values: dict[str, Any] = {key: self.moved(getattr(report, key)) for key in lists}
        if report.fields:
            values["fields"] = moved(report.fields)
        if report.tool_calls:
            calls = report.tool_calls
            values["tool_calls"] = [call.with_values(arguments=moved(call.arguments)) for call in calls]
        if self.edits:
            values["edits"] = list(self.edits)
        return report.with_values(**values)


def is_replaced(report: RiskReport) -> bool:
    return any(edit.text is not None and edit.was is None for edit in report.edits)


def replacement(report: RiskReport, text: str) -> Change:
    """The change of a whole answer into another text. Its spans, claims and citations then cover that text."""
    begin = report.begin

    def moved(entries: Iterable[Entry], shift: int = 0) -> list[Entry]:
        return [
            entry
            if entry.start + shift < begin >= entry.end + shift
            else entry.with_values(start=min(entry.start, begin - shift), end=begin + len(text) - shift)
            for entry in entries
        ]

    size = sum(len(span.text or "") for span in report.spans)
    return Change(text, [Edit(start=begin, end=max(begin, size), text=text)], moved)


_FENCED = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)
_CUT_OFF = frozenset(
    literal[:end] for literal in ("true", "false", "null", "-", ".", "e+", "e-", "E+", "E-") for end in range(6)
)
"""What an error of JSON names where the text ends inside a value."""


def is_machine_read(text: str, report: RiskReport) -> bool:
    """Whether an answer is JSON, in which neither marks nor markers are inserted. It may be one block of code."""
    fenced = _FENCED.fullmatch(text.strip())
    try:
        return "fields" in report.model_fields_set or isinstance(
            json.loads(fenced[1] if fenced else text, parse_int=str), (dict, list)
        )
    except (ValueError, RecursionError):
        return False


def may_become_json(text: str) -> bool:
    text = text.lstrip()
    try:
        _, end = json.JSONDecoder(parse_int=str).raw_decode(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        return error.msg.startswith(("Unterminated", "Invalid \\u")) or rest in _CUT_OFF
    except RecursionError:
        return True
    return not text[end:].strip()


_CLOSES, _INSERTS, _OPENS, _REPLACES = range(4)  # what pieces do at one place, in this order


class _Piece(NamedTuple):
    place: tuple[int, int, int, int]  # the start in the original, what it does, the order of those that do the same
    end: int
    new: str
    edit: Edit
    was: str = ""

    @property
    def start(self) -> int:
        return self.place[0]


class EditedText:
    """The text of an answer with changes: ``original`` is the text without them, ``text`` that with them.

    A mark is closed before a marker at its end. A marker inside a mark or a replaced stretch is moved to its end. Marks
    of one form that overlap are one mark. ``begin`` is the offset of the first character, after any reasoning. If the
    whole answer was ``replaced``, nothing of it is shown.
    """

    def __init__(self, original: str, edits: Sequence[Edit] = (), begin: int = 0, *, replaced: bool = False) -> None:
        self.original, self.begin, self.replaced = original, begin, replaced
        self.edits = [
            edit if edit.text is None else edit.with_values(was=original[edit.start - begin : edit.end - begin])
            for edit in _combined(edits)
        ]
        self._pieces = _pieces(self.edits)
        self._places = [piece.place for piece in self._pieces]
        self._shifts = [0, *accumulate(len(piece.new) - (piece.end - piece.start) for piece in self._pieces)]
        self._shown = [piece.start + shift for piece, shift in zip(self._pieces, self._shifts, strict=False)]
        self.text = spliced(original, [(piece.start - begin, piece.end - begin, piece.new) for piece in self._pieces])

    @classmethod
    def find(cls, text: str, report: RiskReport) -> "EditedText | None":
        """The text of an answer, as its report describes it; ``None`` if something else changed the text."""
        begin, edits = report.begin, report.edits
        if is_replaced(report):
            return cls(text, (), begin, replaced=True) if text == edits[0].text else None
        ranges, grown = list[Replaced](), -begin
        for piece in _pieces(edits):
            at = piece.start + grown
            if not text.startswith(piece.new, at):
                return None
            ranges.append((at, at + len(piece.new), piece.was))
            grown += len(piece.new) - len(piece.was)
        edited = cls(spliced(text, ranges), edits, begin)
        if any(span.text is None for span in report.answer_spans):
            return None
        answer = edited.originals(report.answer_spans)
        end = max(answer[-1].end, begin) if answer else begin
        whole = bool(report.parts) or end - begin == len(edited.original)  # text may stand between several answers
        return edited if whole and all(edited._has(span.start, span.text or "") for span in answer) else None

    @classmethod
    def of(cls, text: str, report: RiskReport) -> "EditedText":
        edited = cls.find(text, report)
        if edited is None:
            raise ConfigError("the text differs from the text of its spans; mark an answer before changing its text")
        return edited

    def spans(self, entries: Sequence[SpanReport]) -> list[SpanReport]:
        """The spans of the answer that are shown, as they are in the original, without text before it such as a tag."""
        spans = []
        for span in [] if self.replaced else self.originals(entries):
            if not span.is_reasoning:
                first = max(span.start, self.begin)
                text = (span.text or "")[first - span.start :]
                spans.append(span.with_values(start=first, end=max(span.end, first), text=text))
        return spans

    def changed(self, edits: Sequence[Edit], *, with_markers: bool = True) -> Change:
        """What further changes of the original make of the text; without ``with_markers`` the old markers go."""
        before = [edit for edit in self.edits if with_markers or edit.start < edit.end]
        new = EditedText(self.original, [*before, *edits], self.begin)

        def moved(entries: Iterable[Entry], shift: int = 0) -> list[Entry]:
            return list(entries) if self.replaced else new.placed(self.originals(entries, shift), shift)

        return Change(new.text, new.edits, moved)

    def placed(self, entries: Iterable[Entry], shift: int = 0) -> list[Entry]:
        """Copies of entries, of the original, with their offsets in the shown text, less ``shift``."""
        places = ((self._place(entry.start, entry.end), entry) for entry in entries)
        return [entry.with_values(start=start - shift, end=end - shift) for (start, end), entry in places]

    def originals(self, entries: Iterable[Entry], shift: int = 0) -> list[Entry]:
        """Copies of entries with the offsets that they have in the original. ``shift`` is added to their offsets.

        A marked entry is shown without the white space at its ends, and one in a replaced stretch as all of it. Its
        text, and the end of the entry before it, tell where it was.
        """
        originals = []
        before = 0
        for entry in entries:
            shown, shown_end = entry.start + shift, entry.end + shift
            start, end = self._offset(shown, is_end=False), self._offset(shown_end, is_end=True)
            lowest, highest = self._offset(shown, is_end=True), self._offset(shown_end, is_end=False)
            text: str | None = getattr(entry, "text", None)
            if text is not None:
                first = start - len(text) + len(text.lstrip())
                last = end - len(text.rstrip())
                likely = (before if lowest < before <= highest else start, start, first, last, lowest)
                start = next((place for place in likely if self._has(place, text)), start)
                end = start + len(text) if self._has(start, text) else end
            if end < start:
                start, end = lowest, highest
            before = end
            originals.append(entry.with_values(start=start, end=end))
        return originals

    def _has(self, start: int, text: str) -> bool:
        cut = max(self.begin - start, 0)
        return start >= 0 and self.original.startswith(text[cut:], start + cut - self.begin)

    def _offset(self, shown: int, *, is_end: bool) -> int:
        """The offset in the original of one in the shown text. What is inserted there is after an end."""
        number = (bisect_left if is_end else bisect_right)(self._shown, shown) - 1
        if number < 0:
            return shown
        piece = self._pieces[number]
        if shown < self._shown[number] + len(piece.new):
            return piece.end if is_end else piece.start
        return shown - self._shifts[number + 1]

    def _place(self, start: int, end: int) -> tuple[int, int]:
        """The shown offsets of a stretch of the original: inside the marks around all of its words."""
        stretch = self.original[max(start - self.begin, 0) : max(end - self.begin, 0)]
        first = max(start, self.begin) + len(stretch) - len(stretch.lstrip())
        last = first + len(stretch.strip())

        def around(does: int, low: int, high: int) -> list[int]:  # the pieces of marks around the words, in a range
            numbers = range(bisect_left(self._places, (low,)), bisect_left(self._places, (high, does + 1)))
            marks = [(number, self._pieces[number]) for number in numbers if self._places[number][1] == does]
            return [n for n, piece in marks if first < last and piece.edit.start <= first and last <= piece.edit.end]

        shown = start + self._shifts[bisect_left(self._places, (start, _OPENS))]
        before = bisect_left(self._places, (start,)) - 1
        if before >= 0 and self._pieces[before].end > start:  # inside what is replaced
            shown = self._shown[before]
        elif opening := around(_OPENS, start, first):
            shown = self._pieces[opening[-1]].start + self._shifts[opening[-1] + 1]
        before = bisect_left(self._places, (end,)) - 1
        if before >= 0 and self._pieces[before].end > end:
            return shown, self._shown[before] + len(self._pieces[before].new)
        if closing := around(_CLOSES, last, end):
            return shown, (end if self._pieces[closing[0]].start == end else last) + self._shifts[closing[0]]
        return shown, max(shown, end + self._shifts[bisect_left(self._places, (end, _INSERTS))])


def _combined(edits: Sequence[Edit]) -> list[Edit]:
    """The changes without those that have no place. What is replaced stays replaced."""
    replaced: list[Edit] = []
    for edit in edits:
        if edit.text is None or any(old.start <= edit.start and edit.end <= old.end for old in replaced):
            continue
        replaced = [old for old in replaced if not (edit.start <= old.start and old.end <= edit.end)]
        start = max((old.end for old in replaced if old.start < edit.start), default=edit.start)
        end = min((old.start for old in replaced if old.start > edit.start), default=edit.end)
        replaced.append(edit.with_values(start=max(start, edit.start), end=min(end, edit.end)))
    marks: dict[tuple[str | None, str | None], list[Edit]] = {}
    markers: dict[tuple[int, str], set[int]] = {}
    stretches = list(replaced)
    for edit in edits:
        if edit.text is None and edit.start < edit.end:
            start = min([edit.start, *(old.start for old in replaced if old.start < edit.start < old.end)])
            end = max([edit.end, *(old.end for old in replaced if old.start < edit.end < old.end)])
            around = [(old.start, old.end) for old in replaced if old.start <= start and end <= old.end]
            if around in ([], [(start, end)]):
                marks.setdefault((edit.before, edit.after), []).append(edit.with_values(start=start, end=end))
    for of_form in marks.values():  # those that overlap are one
        united: list[Edit] = []
        for mark in sorted(of_form, key=lambda mark: mark.start):
            if united and mark.start < united[-1].end:
                united[-1] = united[-1].with_values(end=max(united[-1].end, mark.end))
            else:
                united.append(mark)
        stretches += united
    for edit in edits:
        if edit.start == edit.end:
            marker = edit.after or ""
            place, form = edit.start, "{}\n" if marker.endswith("\n") else " {}"
            while inside := [stretch.end for stretch in stretches if stretch.start < place < stretch.end]:
                place, form = max(inside), " {}"
            markers.setdefault((place, form), set()).update(map(int, re.findall(r"\d+", marker)))
    groups = {key: "".join(f"[{source}]" for source in sorted(sources)) for key, sources in markers.items()}
    return [*stretches, *(Edit(start=at, end=at, after=form.format(group)) for (at, form), group in groups.items())]


def _pieces(edits: Sequence[Edit]) -> list[_Piece]:
    """What the changes insert and replace, in the order of the shown text. Marks at one place are nested by size."""
    pieces: list[_Piece] = []
    for number, edit in enumerate(edits):
        start, end = edit.start, edit.end
        if start == end:
            pieces.append(_Piece((end, _INSERTS, number, 0), end, edit.after or "", edit))
        elif edit.text is not None:
            pieces.append(_Piece((start, _REPLACES, 0, 0), end, edit.text, edit, edit.was or ""))
        else:
            pieces.append(_Piece((start, _OPENS, -end, -number), start, edit.before or "", edit))
            pieces.append(_Piece((end, _CLOSES, -start, number), end, edit.after or "", edit))
    return sorted(pieces, key=lambda piece: piece.place)
