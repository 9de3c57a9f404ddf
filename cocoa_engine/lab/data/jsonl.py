"""Your own labelled data: JSON lines with ``id``, ``prompt``, ``text`` and ``label`` or ``spans``.

>>> {"id": "1", "prompt": "Who wrote Dune?", "text": "Frank Herbert, in 1865.", "spans": [[18, 22]]}

``label`` is true for a hallucinated answer. ``spans`` are the hallucinated parts as ``[start, end]`` in characters; an
empty list means that there are none. Two fields are optional: ``group``, an id that answers to the same prompt share,
and ``source``, the part of the prompt that should support the answer, word for word.
"""

from __future__ import annotations

from pathlib import Path

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data.records import LabelledSpan, LabelledText
from cocoa_engine.lab.files import field, plain_text, read_json_lines


def matches(path: Path) -> bool:
    """A file of JSON lines (mu-SHROOM files are detected first)."""
    return not path.is_dir() and path.suffix == ".jsonl"


def read(path: Path) -> list[LabelledText]:
    """Read the records of a file.

    Raises:
        DataError: a field is missing or of a wrong type, or the same answer has both labels.
    """
    records = []
    labels: dict[tuple[str, str], bool] = {}
    for where, row in read_json_lines(path):
        prompt = field(row, "prompt", str, where)
        spans: tuple[LabelledSpan, ...] | None = None
        if "spans" in row:
            pairs = field(row, "spans", list, where)
            if any(not isinstance(pair, list) or [type(end) for end in pair] != [int, int] for pair in pairs):
                raise DataError(f"{where}: each of the spans must be [start, end].")
            spans = tuple(LabelledSpan(*pair) for pair in sorted(pairs))
        label = bool(spans) if spans is not None and "label" not in row else field(row, "label", bool, where)
        text = field(row, "text", str, where)
        if spans is None and labels.setdefault((prompt, text), label) != label:
            raise DataError(f"{where}: the same answer to the same prompt has the other label in an earlier line.")
        records.append(
            LabelledText(
                id=str(field(row, "id", (str, int), where)),
                prompt=prompt,
                text=text,
                question=prompt,
                label=label,
                spans=spans,
                group=plain_text(row.get("group", prompt), "group", where),
                source=field(row, "source", str, where) if "source" in row else None,
            )
        )
    return records
