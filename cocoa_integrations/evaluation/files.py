"""Data files into records, each with its place in the file. What a record must hold is the task's business."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from cocoa_engine.errors import DataError, MissingExtraError

SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")


class Record(NamedTuple):
    """One record of a file, and where it stands, in words."""

    where: str
    values: dict[str, Any]

    def text(self, *names: str) -> str:
        """The text in the first of these columns that there is.

        Raises:
            DataError: there is none of them, or it holds no text.
        """
        name = self._column(names)
        value = self.values[name]
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{self.where}: {name!r} {_fault(value, 'a text')}")
        return value.strip()

    def texts(self, *names: str, separator: str | None = None) -> list[str]:
        """The texts in the first of these columns that there is; with a separator, the parts of one text.

        Raises:
            DataError: there is none of them, or a text in it is empty (of parts: all are).
        """
        name = self._column(names)
        value = self.values[name]
        if separator is not None and isinstance(value, str):
            value = [part for part in value.split(separator) if part.strip()]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise DataError(f"{self.where}: {name!r} {_fault(value, 'a list of texts')}")
        for one in value:
            if not isinstance(one, str) or not one.strip():
                raise DataError(f"{self.where}: {name!r} {_fault(one, 'a list of texts')}")
        return [one.strip() for one in value]

    def identity(self, *names: str) -> str:
        """The record's id, a text or a whole number.

        Raises:
            DataError: there is none.
        """
        name = self._column(names)
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
            raise DataError(f"{self.where}: {name!r} {_fault(value, 'an id')}")
        return str(value).strip()

    def _column(self, names: Sequence[str]) -> str:
        for name in names:
            if name in self.values:
                return name
        wanted = " or ".join(map(repr, names))
        raise DataError(f"{self.where}: there is no column {wanted}; there are {', '.join(map(repr, self.values))}")


def _fault(value: Any, wanted: str) -> str:
    if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
        return "is empty"
    return f"must be {wanted}, not {type(value).__name__}"


def find_file(path: str | Path) -> Path:
    """The data file that a path means: itself, or the only one in a folder.

    Raises:
        DataError: there is none, or there are several.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and _suffix(file) in SUFFIXES)
        if len(files) != 1:
            found = ", ".join(file.name for file in files) or "none"
            raise DataError(f"{path} is a folder with not exactly one data file ({found}); name the file")
        return files[0]
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of the data on this machine, nothing is downloaded")
    if _suffix(path) not in SUFFIXES:
        raise DataError(f"{path}: data files are {', '.join(SUFFIXES)} (or .gz of the first three)")
    return path


def fingerprint(path: Path) -> str:
    """What tells a file's content from another's: the beginning of its SHA-256."""
    return sha256(path.read_bytes()).hexdigest()[:16]


def read_records(path: Path) -> list[Record]:
    """All records of a file, in order.

    Raises:
        DataError: it is not UTF-8, not of its format, or empty.
    """
    suffix = _suffix(path)
    if suffix == ".parquet":
        records = _parquet(path)
    else:
        text = _utf8(path)
        records = list({".csv": _csv, ".json": _json, ".jsonl": _jsonl}[suffix](path, text))
    if not records:
        raise DataError(f"{path} holds no records")
    return records


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _utf8(path: Path) -> str:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from error


def _csv(path: Path, text: str) -> Iterator[Record]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where}: the row has not as many fields as there are columns")
            yield Record(where, dict(row))
    except csv.Error as error:
        raise DataError(f"{path}, after line {reader.line_num}: {error}") from error


def _json(path: Path, text: str) -> Iterator[Record]:
    values = _parse(text, str(path))
    if not isinstance(values, list):
        raise DataError(f"{path}: a .json file must hold a list of records, not {type(values).__name__}")
    for number, value in enumerate(values):
        yield Record(f"{path}, record {number}", _mapping(value, f"{path}, record {number}"))


def _jsonl(path: Path, text: str) -> Iterator[Record]:
    # str.splitlines would also split at characters that may stand inside a JSON text
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}, line {number}"
        if line.strip():
            yield Record(where, _mapping(_parse(line, where), where))


def _parquet(path: Path) -> list[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("parquet files need pyarrow: pip install 'cocoa-integrations[eval]'") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return [Record(f"{path}, record {number}", row) for number, row in enumerate(rows)]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply to be read") from error
    except ValueError as error:  # also of a number with thousands of digits
        raise DataError(f"{where}: not JSON ({error})") from error


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a record must be a JSON object, not {type(value).__name__}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1].encode("ascii", "backslashreplace").decode()
        raise DataError(f"{where}: {half} is half a character (a lone surrogate); write the whole one") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply to be read") from error
    return value
