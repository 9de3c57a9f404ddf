"""Reading of data files into records that know their position in the file, and files of JSON lines that grow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

from cocoa_engine.errors import DataError, safe_cause
from cocoa_engine.lab.files import (
    Row,
    as_object,
    parse_json,
    read_csv,
    read_json_lines,
    read_json_list,
    read_parquet,
)
from cocoa_engine.output_files import append, open_in_place

_READERS: dict[str, Callable[[Path], Iterable[Row]]] = {
    ".csv": read_csv,
    ".json": read_json_list,
    ".jsonl": read_json_lines,
    ".parquet": read_parquet,
}
SUFFIXES = tuple(_READERS)


class Record(NamedTuple):
    """One record of a file, and a description of its position for error messages."""

    where: str
    values: Mapping[str, Any]

    def text(self, *names: str) -> str:
        """The text in the first of these columns that exists.

        Raises:
            DataError: no column exists, or it does not contain text.
        """
        name = self._column(names)
        value = self.values[name]
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{self.where}: {name!r} {_problem(value, 'a text')}")
        return value.strip()

    def texts(self, *names: str, separator: str | None = None) -> list[str]:
        """The texts in the first of these columns that exists. With a separator, a text is split into parts.

        Raises:
            DataError: no column exists, or a text in it is empty (with a separator: all parts are).
        """
        name = self._column(names)
        value = self.values[name]
        if separator is not None and isinstance(value, str):
            value = [part for part in value.split(separator) if part.strip()]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise DataError(f"{self.where}: {name!r} {_problem(value, 'a list of texts')}")
        for item in value:
            if not isinstance(item, str) or not item.strip():
                raise DataError(f"{self.where}: {name!r} {_problem(item, 'a list of texts')}")
        return [item.strip() for item in value]

    def identity(self, *names: str) -> str:
        """The id of the record, a text or an integer.

        Raises:
            DataError: the record has no id.
        """
        name = self._column(names)
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
            raise DataError(f"{self.where}: {name!r} {_problem(value, 'an id')}")
        return str(value).strip()

    def _column(self, names: Sequence[str]) -> str:
        for name in names:
            if name in self.values:
                return name
        expected = " or ".join(map(repr, names))
        raise DataError(f"{self.where}: there is no column {expected}; there are {', '.join(map(repr, self.values))}")


def _problem(value: object, expected: str) -> str:
    if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
        return "is empty"
    return f"must be {expected}, not {type(value).__name__}"


def find_file(path: str | Path) -> Path:
    """The data file at a path: the file itself, or the only data file in a folder.

    Raises:
        DataError: there is no data file, or there are several.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and _suffix(file) in SUFFIXES)
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise DataError(f"{path} is a folder that does not contain exactly one data file ({names}); name the file")
        return files[0]
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of the data on this machine, nothing is downloaded")
    if _suffix(path) not in SUFFIXES:
        raise DataError(f"{path}: data files are {', '.join(SUFFIXES)} (or .gz of the first three)")
    return path


def fingerprint(path: Path) -> str:
    """The first digits of the SHA-256 of a file."""
    return sha256(path.read_bytes()).hexdigest()[:16]


def read_records(path: Path) -> list[Record]:
    """All records of a file, in order.

    Raises:
        DataError: it is not UTF-8, not of its format, or empty.
        MissingExtraError: it is a parquet file, and pyarrow is not installed.
    """
    records = [Record(where, values) for where, values in _READERS[_suffix(path)](path)]
    if not records:
        raise DataError(f"{path} holds no records")
    return records


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def json_lines(values: Iterable[Mapping[str, Any]]) -> str:
    """Values as JSON lines."""
    return "".join(dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values)


def append_lines(file: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append values to a file of JSON lines. On return they have been written to disk."""
    append(file, json_lines(values).encode())


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The values of a file that :func:`append_lines` writes; empty if there is no file.

    An incomplete last line is removed from the file.

    Raises:
        DataError: another line is not a JSON object.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with open_in_place(file) as torn:
            torn.truncate(whole)
    values = []
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        where = f"{file}, line {number}"
        try:
            values.append(dict(as_object(parse_json(line.decode(), where), where)))
        except (UnicodeDecodeError, DataError) as error:
            raise DataError(f"{where}: not a row of a run; the file was changed") from safe_cause(error)
    return values
