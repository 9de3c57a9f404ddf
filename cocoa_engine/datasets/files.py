"""Data files as rows, with errors that name the file and the line."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError
from cocoa_engine.optional import need

Row = tuple[str, Mapping[str, Any]]
"""Where a row is, for messages, and its values by field or column."""


def read_text(path: Path) -> str:
    """A file's text, which must be UTF-8 (with or without a byte-order mark); a ``.gz`` file is unpacked.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it (iconv)."
        ) from None


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    text = read_text(path)
    return _checked(_parsed(text, str(path)), text, str(path))


def read_json_list(path: Path) -> Iterator[Row]:
    """The objects of a JSON file that holds a list of them.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    text = read_text(path)
    values = _parsed(text, str(path))
    if not isinstance(values, list):
        raise DataError(f"{path}: a .json file must hold a list of records, not {type(values).__name__}.")
    for number, value in enumerate(values):
        where = f"{path}, record {number}"
        yield where, as_object(_checked(value, text, where), where)


def read_json_lines(path: Path) -> Iterator[Row]:
    """The object of each line; empty lines are skipped.

    Raises:
        DataError: it cannot be read, or a line is no JSON object.
    """
    # str.splitlines would also split at characters that may stand inside a JSON text
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, as_object(_checked(_parsed(line, where), line, where), where)


def read_csv(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The cells of each row by column; empty rows are skipped.

    Args:
        path: the file, whose first row is the header.
        columns: these must be there.

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


def read_parquet(path: Path) -> Iterator[Row]:
    """The rows of a parquet file.

    Raises:
        DataError: it cannot be read.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = need("pyarrow.parquet", extra="eval", what="reading parquet files")
    import pyarrow

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}.") from None
    for number, row in enumerate(rows):
        yield f"{path}, record {number}", row


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
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if row:
                yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not CSV that can be read: {error}.") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}.") from None
    except RecursionError:
        raise DataError(f"{where}: the JSON is nested too deeply to be read.") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where} is not JSON that can be read: {error}.") from None


def _checked(value: Any, text: str, where: str) -> Any:
    """A value of a JSON text, if no text in it holds half of a character that is written as two: no tokenizer takes it.

    Raises:
        DataError: one does.
    """
    if r"\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(f"{where}: a text holds {half!a}, half of a surrogate pair.") from None
    return value
