"""mu-SHROOM (SemEval 2025 task 3): answers of language models with hallucinated character spans, JSON lines."""

from __future__ import annotations

from pathlib import Path

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data.records import LabelledSpan, LabelledText
from cocoa_engine.lab.files import field, read_json_lines
from cocoa_engine.safe_text import short_repr


def matches(path: Path) -> bool:
    """A folder with JSON lines, or JSON lines with the field ``model_output_text``."""
    if path.is_dir():
        return any(path.glob("*.jsonl"))
    if path.suffix != ".jsonl":
        return False
    _, first = next(read_json_lines(path), ("", {}))
    return "model_output_text" in first


def read(path: Path) -> list[LabelledText]:
    """Read the answers of a file, or of all ``*.jsonl`` in a folder. The hard labels are the hallucinated parts.

    Raises:
        DataError: a field is missing or of a wrong type.
    """
    records = []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for where, row in read_json_lines(file):
            question = field(row, "model_input", str, where)
            spans = []
            for pair in field(row, "hard_labels", list, where):
                if not (isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)):
                    raise DataError(f"{where}: a hard label must be [start, end], not {short_repr(pair)}.")
                spans.append(LabelledSpan(*pair))
            records.append(
                LabelledText(
                    id=field(row, "id", str, where),
                    prompt=f"Question: {question}\nAnswer:",
                    text=field(row, "model_output_text", str, where),
                    question=question,
                    label=bool(spans),
                    spans=tuple(sorted(spans, key=lambda span: span.start)),
                    group=question,
                )
            )
    return records
