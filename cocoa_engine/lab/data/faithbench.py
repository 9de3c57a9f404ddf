"""FaithBench (Bao et al., 2025): summaries by ten language models with annotated spans, JSON files ``batch_N.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cocoa_engine.lab.data.records import LabelledSpan, LabelledText
from cocoa_engine.lab.files import as_object, field, plain_text, read_json

HALLUCINATED = "Unwanted"
"""The kind that counts as hallucinated. ``Benign`` and ``Questionable`` spans are read too, but do not count."""


def matches(path: Path) -> bool:
    """A folder with ``batch_*.json``, or a JSON file with ``samples``."""
    if path.is_dir():
        return any(path.glob("batch_*.json"))
    if path.suffix != ".json":
        return False
    value = read_json(path)
    return isinstance(value, dict) and "samples" in value


def read(path: Path) -> list[LabelledText]:
    """Read the summaries of a file, or of all ``batch_*.json`` in a folder.

    Raises:
        DataError: a field is missing or of a wrong type.
    """
    records = []
    for file in sorted(path.glob("batch_*.json")) if path.is_dir() else [path]:
        samples = field(as_object(read_json(file), str(file)), "samples", list, str(file))
        for number, value in enumerate(samples):
            where = f"{file}, sample {number}"
            sample = as_object(value, where)
            source = field(sample, "source", str, where)
            spans = [_span(as_object(one, where), where) for one in field(sample, "annotations", list, where)]
            question = f"Summarise this passage in a few sentences, using only what it says.\n\n{source}"
            records.append(
                LabelledText(
                    id=f"{file.stem}/{field(sample, 'sample_id', int, where)}",
                    prompt=f"Passage: {source}\n\nSummary:",
                    text=field(sample, "summary", str, where),
                    question=question,
                    label=any(span.hallucinated for span in spans),
                    spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
                    group=source,
                    source=source or None,
                )
            )
    return records


def _span(annotation: Mapping[str, Any], where: str) -> LabelledSpan:
    kinds = field(annotation, "label", list, where)
    kind = plain_text(kinds[0], "label", where) if kinds else "unnamed"
    start, end = (field(annotation, f"summary_{side}", int, where) for side in ("start", "end"))
    return LabelledSpan(start, end, kind, HALLUCINATED in kinds)
