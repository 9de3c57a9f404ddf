"""Changes of the text of an answer. The offsets of everything that refers to the text follow them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """A change of a stretch of a text. A stretch without characters is a place at which something is inserted.

    Attributes:
        start: offset of the first character.
        end: offset after the last one.
        before: what is inserted before the stretch.
        after: what is inserted after it.
        text: what replaces the stretch; ``None``: it stays.
    """

    start: int
    end: int
    before: str = ""
    after: str = ""
    text: str | None = None


def apply_edits(text: str, edits: Sequence[Edit], entries: Iterable[dict[str, Any]]) -> str:
    """The changed text. The ``start`` and ``end`` of the entries are moved accordingly.

    An entry keeps its text where a change only adds to the text around it. An entry of which a part is replaced covers
    the replacement.

    Args:
        text: the text.
        edits: the changes, in order. They do not overlap.
        entries: objects with ``start`` and ``end`` in the text.
    """
    replaced = [
        one
        for edit in edits
        for one in (
            (edit.start, edit.start, edit.before),
            (edit.start, edit.end, text[edit.start : edit.end] if edit.text is None else edit.text),
            (edit.end, edit.end, edit.after),
        )
        if one[0] < one[1] or one[2]
    ]
    for entry in entries:
        start, end = entry["start"], entry["end"]
        entry["start"] = _moved(start, replaced, start, is_start=True)
        entry["end"] = max(entry["start"], _moved(end, replaced, start, is_start=False))
    for start, end, new in reversed(replaced):
        text = f"{text[:start]}{new}{text[end:]}"
    return text


def _moved(offset: int, replaced: Sequence[tuple[int, int, str]], begin: int, *, is_start: bool) -> int:
    """The offset after changes. What is inserted at the start of an entry is before it, what is at its end after it."""
    moved = offset
    for start, end, new in replaced:
        if start == end:
            moved += len(new) if start < offset or (start == offset and is_start) else 0
        elif end <= offset:
            moved += len(new) - (end - start)
        elif start < offset and len(new) != end - start:  # inside of a replaced stretch
            moved += (0 if is_start else len(new)) - (offset - start)
    return moved
