"""Data files of tasks, and files of JSON lines that grow."""

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cocoa_engine.errors import DataError
from cocoa_engine.files import append, open_in_place
from cocoa_engine.lab.files import (
    Row,
    RowModel,
    parse_json,
    parsed,
    read_csv,
    read_json_lines,
    read_json_list,
    read_parquet,
    suffix_of,
)

_READERS: dict[str, Callable[[Path], Iterable[Row]]] = {
    ".csv": read_csv,
    ".json": read_json_list,
    ".jsonl": read_json_lines,
    ".parquet": read_parquet,
}


def find_file(path: str | Path) -> Path:
    """The data file at a path: the file itself, or the only data file in a folder."""
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and suffix_of(file) in _READERS)
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise DataError(f"{path} is a folder that does not contain exactly one data file ({names}); name the file")
        return files[0]
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of the data on this machine, nothing is downloaded")
    if suffix_of(path) not in _READERS:
        raise DataError(f"{path}: data files are {', '.join(_READERS)} (or .gz of the first three)")
    return path


def fingerprint(path: Path) -> str:
    """The first digits of the SHA-256 of a file."""
    return sha256(path.read_bytes()).hexdigest()[:16]


def read_records(path: Path) -> list[Row]:
    """All records of a file, at least one, in order."""
    records = list(_READERS[suffix_of(path)](path))
    if not records:
        raise DataError(f"{path} holds no records")
    return records


def json_lines(values: Iterable[Mapping[str, Any]]) -> str:
    return "".join(dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values)


def append_lines(file: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append values to a file of JSON lines. On return they have been written to disk."""
    append(file, json_lines(values).encode())


def read_lines(file: Path, kind: type[BaseModel] = RowModel) -> list[dict[str, Any]]:
    """The values of a file that :func:`append_lines` writes, as they are; empty if there is no file.

    An incomplete last line is removed from the file.

    Raises:
        DataError: another line does not fit the model ``kind``.
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
            values.append(parse_json(line.decode(), where))
            parsed(kind, values[-1], where)
        except (UnicodeDecodeError, DataError) as error:
            raise DataError(f"{where}: not a row of a run; the file was changed") from error
    return values
