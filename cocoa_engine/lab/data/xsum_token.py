"""XSum outputs with a hallucination label for every word (Zhou et al., 2021): folders of parallel text files.

Each system's folder has a ``.docid``, ``.source``, ``.target`` and ``.label`` file with one line per summary.
"""

from __future__ import annotations

from pathlib import Path

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data.records import LabelledSpan, LabelledText
from cocoa_engine.lab.files import read_text

_PARTS = ("docid", "source", "target", "label")


def matches(path: Path) -> bool:
    """A folder with ``.label`` files, or with folders that have them."""
    return path.is_dir() and (any(path.glob("*.label")) or any(path.glob("*/*.label")))


def read(path: Path) -> list[LabelledText]:
    """Read the summaries of a system's folder, or of every such folder in a folder. ``\\'`` is read as ``'``.

    Raises:
        DataError: a file is missing, the files have different numbers of lines, or the labels of a summary do
            not match its words.
    """
    labels = sorted([*path.glob("*.label"), *path.glob("*/*.label")])
    if not labels:
        raise DataError(f"{path} has no .label file, and neither has a folder in it.")
    return [record for file in labels for record in _system(file)]


def _system(labels: Path) -> list[LabelledText]:
    lines = {part: read_text(labels.with_suffix(f".{part}")).removesuffix("\n").split("\n") for part in _PARTS}
    if len({len(part) for part in lines.values()}) > 1:
        counts = ", ".join(f".{name} {len(part)}" for name, part in lines.items())
        raise DataError(f"{labels.parent}: the files have different numbers of lines ({counts}).")
    records = []
    for number, (doc, source, target, label) in enumerate(zip(*lines.values(), strict=True), start=1):
        text = target.replace("\\'", "'").strip()
        spans = _spans(text, label.split(), f"{labels}, line {number}")
        records.append(
            LabelledText(
                id=f"{labels.stem}/{doc.strip()}",
                prompt=f"Article: {source.strip()}\n\nSummary in one sentence:",
                text=text,
                question=f"Summarise this article in one sentence.\n\n{source.strip()}",
                label=bool(spans),
                spans=spans,
                group=doc.strip(),
                source=source.strip() or None,
            )
        )
    return records


def _spans(text: str, labels: list[str], where: str) -> tuple[LabelledSpan, ...]:
    """One span for each run of words labelled 1."""
    words = text.split()
    if len(words) != len(labels) or set(labels) - {"0", "1"}:
        raise DataError(f"{where}: {len(words)} words need as many labels 0 or 1, found {len(labels)}.")
    spans: list[LabelledSpan] = []
    end, before = 0, "0"
    for word, label in zip(words, labels, strict=True):
        start = text.index(word, end)
        end = start + len(word)
        if label == "1":
            spans.append(LabelledSpan(spans.pop().start if before == "1" else start, end))
        before = label
    return tuple(spans)
