"""The formats of labelled data that can be read. A further one is a file beside this one and a line below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cocoa_engine.errors import DataError
from cocoa_engine.faults import unknown
from cocoa_engine.labelled import diasumfact, faithbench, mushroom, own, truthfulqa, xsum_token
from cocoa_engine.labelled.files import read_json, read_json_lines
from cocoa_engine.labelled.records import LabelledText, checked

FORMATS: dict[str, Callable[[Path], list[LabelledText]]] = {
    "truthfulqa": truthfulqa.read,
    "mushroom": mushroom.read,
    "faithbench": faithbench.read,
    "diasumfact": diasumfact.read,
    "xsum-token": xsum_token.read,
    "jsonl": own.read,
}


def read_labelled(path: str | Path, format: str | None = None, *, both_classes: bool = True) -> list[LabelledText]:
    """Read a labelled data set and check it.

    Args:
        path: a file or folder.
        format: one of :data:`FORMATS`; none finds out.
        both_classes: whether there must be hallucinated and supported answers or parts.

    Raises:
        DataError: it is not there, its format is not known or not as it should be, or its labels are of one
            class only, where both are asked for.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"there is no file or folder {path}.")
    name = detect_format(path) if format is None else format
    if name not in FORMATS:
        raise DataError(unknown([name], FORMATS, what="format"))
    return checked(FORMATS[name](path), path, both_classes=both_classes)


def detect_format(path: Path) -> str:
    """The format of a file or folder, by its names and its first record.

    Raises:
        DataError: it is none that is known.
    """
    if path.is_dir():
        for name, pattern in (
            ("truthfulqa", truthfulqa.FILE),
            ("mushroom", "*.jsonl"),
            ("faithbench", "batch_*.json"),
            ("diasumfact", "annotations.json"),
            ("xsum-token", "*.label"),
            ("xsum-token", "*/*.label"),
        ):
            if any(path.glob(pattern)):
                return name
    elif path.suffix == ".csv":
        return "truthfulqa"
    elif path.suffix == ".jsonl":
        _, first = next(read_json_lines(path), ("", {}))
        return "mushroom" if "model_output_text" in first else "jsonl"
    elif path.suffix == ".json":
        value = read_json(path)
        return "faithbench" if isinstance(value, dict) and "samples" in value else "diasumfact"
    raise DataError(f"the format of {path} is not known; name one of {', '.join(FORMATS)}.")
