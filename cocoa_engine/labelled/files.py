"""Reading files of labelled data, with errors that say where the fault is."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError


def read_text(path: Path) -> str:
    """A file's text, which must be UTF-8 (with or without a byte-order mark).

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); convert it (iconv does)."
        ) from None


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    return _parsed(read_text(path), str(path))


def read_json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each line's object is, for messages, and the object; empty lines are skipped.

    Raises:
        DataError: it cannot be read, or a line is no JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, as_object(_parsed(line, where), where)


def read_csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Where each row is, for messages, and its cells by column.

    Raises:
        DataError: it cannot be read, a column is missing, or a row has not as many fields as the header.
    """
    rows = _csv_rows(path)
    _, header = next(rows, ("", []))
    if missing := [name for name in columns if name not in header]:
        raise DataError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has {', '.join(header)}."
        )
    for where, row in rows:
        if len(row) != len(header):
            differs = "shorter" if len(row) < len(header) else "longer"
            raise DataError(
                f"{where}: the row is {differs} than the header: {len(row)} fields, not {len(header)}. A field that "
                "holds a comma needs quotes."
            )
        yield where, dict(zip(header, row, strict=True))


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}.")
    return value


def field(record: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """A field of a record.

    Raises:
        DataError: it is missing or of another type.
    """
    if name not in record:
        raise DataError(f"{where}: the field {name!r} is missing; there are {', '.join(record)}.")
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise DataError(f"{where}: the field {name!r} must be {wanted}, not {type(value).__name__}.")
    return value


def _csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Where each row ends, for messages, and its fields; empty rows are skipped."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        for row in reader:
            if row:
                yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not CSV that can be read: {error}.") from None


def _parsed(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if r"\ud" in text.lower():  # half of a character that is written as two: no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}.") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(f"{where}: a text holds {half!a}, half of a surrogate pair.") from None
    except RecursionError:
        raise DataError(f"{where}: the JSON is nested too deeply to be read.") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where} is not JSON that can be read: {error}.") from None
    return value
