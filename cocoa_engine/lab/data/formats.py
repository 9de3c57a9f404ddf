"""The registry of data set formats. To add a format, write its module here and add a line to ``READERS``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cocoa_engine.errors import DataError
from cocoa_engine.lab.data import diasumfact, faithbench, jsonl, mushroom, truthfulqa, xsum_token
from cocoa_engine.lab.data.records import LabelledText, checked
from cocoa_engine.messages import unknown


class Reader(Protocol):
    """The functions that the module of a format defines."""

    def read(self, path: Path) -> list[LabelledText]:
        """Read a file or folder of this format."""
        ...

    def matches(self, path: Path) -> bool:
        """Whether an existing file or folder looks like this format. Formats are tried in the registry's order."""
        ...


READERS: dict[str, Reader] = {
    "truthfulqa": truthfulqa,
    "mushroom": mushroom,
    "faithbench": faithbench,
    "diasumfact": diasumfact,
    "xsum-token": xsum_token,
    "jsonl": jsonl,
}

FORMATS: dict[str, Callable[[Path], list[LabelledText]]] = {name: reader.read for name, reader in READERS.items()}
"""The function that reads each format, by the format's name."""


def read_labelled(path: str | Path, format: str | None = None, *, both_classes: bool = True) -> list[LabelledText]:
    """Read a labelled data set and check it.

    Args:
        path: a file or folder.
        format: one of :data:`FORMATS`. Default: detected by :func:`detect_format`.
        both_classes: require hallucinated and supported answers or parts.

    Raises:
        DataError: the path does not exist, the format is unknown, the data is malformed, or its labels are of
            one class only although both are required.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"there is no file or folder {path}.")
    name = detect_format(path) if format is None else format
    if name not in FORMATS:
        raise DataError(unknown([name], FORMATS, what="format"))
    return checked(FORMATS[name](path), path, both_classes=both_classes)


def detect_format(path: Path) -> str:
    """The format of a file or folder, by its file names and its first record.

    Raises:
        DataError: no format matches.
    """
    for name, reader in READERS.items():
        if reader.matches(path):
            return name
    raise DataError(f"the format of {path} is not known; name one of {', '.join(FORMATS)}.")
