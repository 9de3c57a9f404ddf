"""Data files as rows, with errors that name the file and the line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cocoa_engine.errors import DataError
from cocoa_engine.optional import need

INFLATED_LIMIT = 2**30
"""Number of bytes to which a compressed file may grow. A small file can contain any number of them."""

_ROW_BYTES = 100  # of a row, at least, when it is a Python object

Row = tuple[str, Mapping[str, Any]]
"""The location of a row, for messages, and its values by field or column."""


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, with or without a byte-order mark. A ``.gz`` file is decompressed.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        data = _inflated(path) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: the path contains a NUL character
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it (iconv)."
        ) from None


def read_document(path: Path) -> str:
    """Read a text file as :func:`read_text` does, with ``\\n`` at the end of every line.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    return io.StringIO(read_text(path), newline=None).read()


def _inflated(path: Path) -> bytes:
    """The content of a gzip file.

    Raises:
        DataError: it is larger than :data:`INFLATED_LIMIT`.
    """
    with gzip.open(path) as file:
        data = file.read(INFLATED_LIMIT + 1)
    _check_inflated(path, len(data))
    return data


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    return parse_json(read_text(path), str(path))


def read_json_list(path: Path) -> Iterator[Row]:
    """Iterate over the objects of a JSON file that contains a list of objects.

    Raises:
        DataError: it cannot be read, or is not a list of objects.
    """
    text = read_text(path)
    values = _parsed(text, str(path))
    if not isinstance(values, list):
        raise DataError(f"{path}: a .json file must hold a list of records, not {type(values).__name__}.")
    for number, value in enumerate(values):
        where = f"{path}, record {number}"
        yield where, as_object(_checked(value, text, where), where)


def read_json_lines(path: Path) -> Iterator[Row]:
    """Iterate over the objects of a JSON lines file. Empty lines are skipped.

    Raises:
        DataError: it cannot be read, or a line is not a JSON object.
    """
    # str.splitlines would also split at characters that may occur inside a JSON string
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, as_object(parse_json(line, where), where)


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text.

    Raises:
        DataError: it is not JSON, is nested too deeply, or a string in it has a lone surrogate.
    """
    return _checked(_parsed(text, where), text, where)


def read_csv(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """Iterate over the rows of a CSV file, each as cells by column. Empty rows are skipped.

    Args:
        path: the file, whose first row is the header.
        columns: the required columns.

    Raises:
        DataError: it cannot be read, a column is missing, or a row and the header differ in their number of fields.
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
    """Iterate over the rows of a parquet file.

    Raises:
        DataError: it cannot be read, or is larger than :data:`INFLATED_LIMIT` when decompressed.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = need("pyarrow.parquet", extra="eval", what="reading parquet files")
    import pyarrow

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_inflated(path, sum(_inflated_size(file.metadata.row_group(n)) for n in range(file.num_row_groups)))
            row_size = sum(max(8, leaf.length) for leaf in file.schema)  # without texts
            most = max(1, INFLATED_LIMIT // max(1, row_size))
            _measure(path, file, min(2**16, most))
            for batch in file.iter_batches(batch_size=min(1024, most)):
                for row in batch.to_pylist():
                    yield f"{path}, record {number}", row
                    number += 1
    except DataError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}.") from None


def _inflated_size(group: Any) -> int:
    """The size of a row group without compression, by the file's metadata, in which nulls have no size.

    The metadata of its columns is not read: in a damaged file, that aborts the process in pyarrow.
    """
    return max(0, group.total_byte_size) + max(0, group.num_rows * group.num_columns)


def _measure(path: Path, file: Any, rows_at_once: int) -> None:
    """Refuse a parquet file whose values are larger than the limit, whatever its metadata says.

    A file of a kilobyte may repeat a large value a million times. Texts are therefore read as dictionaries, which have
    each value once, and their size is computed from these.

    Args:
        path: the file.
        file: the opened file.
        rows_at_once: the largest number of rows to read at once. Each batch copies the dictionary of its row group.

    Raises:
        DataError: it is larger.
    """
    from pyarrow import parquet

    texts = [number for number, leaf in enumerate(file.schema) if leaf.physical_type == "BYTE_ARRAY"]
    size = 0
    # extension types, such as that of JSON, have no dictionaries
    with parquet.ParquetFile(path, read_dictionary=texts, arrow_extensions_enabled=False) as measured:
        for group in range(measured.num_row_groups):  # a nested dictionary cannot span several
            for batch in measured.iter_batches(rows_at_once, row_groups=[group]):
                size += sum(map(_repeated_size, batch.columns)) + _ROW_BYTES * batch.num_rows
                _check_inflated(path, size)


def _repeated_size(column: Any) -> int:
    """The size of an Arrow array if the values of its dictionaries are repeated as often as they occur."""
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        lengths = compute.binary_length(column.dictionary).cast("int64")
        return column.indices.nbytes + (compute.sum(lengths.take(column.indices)).as_py() or 0)
    if types.is_struct(column.type):
        return sum(map(_repeated_size, column.flatten()))
    if types.is_map(column.type):  # has no flatten()
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return 8 * len(column) + _repeated_size(column.values.slice(first, last - first))
    if types.is_nested(column.type):
        return 8 * len(column) + _repeated_size(column.flatten())
    return column.nbytes


def _check_inflated(path: Path, size: int) -> None:
    """Refuse a file that is larger than the limit when decompressed."""
    if size > INFLATED_LIMIT:
        raise DataError(
            f"{path} is larger than {INFLATED_LIMIT // 2**20} MiB when decompressed, which is the limit; divide it, or "
            "decompress it yourself."
        )


def as_object(value: Any, where: str) -> Mapping[str, Any]:
    """Check that a value is a JSON object, and return it.

    Raises:
        DataError: the value is something else.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}.")
    return value


def field(record: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Get a field of a record, and check its type.

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


def plain_text(value: Any, name: str, where: str) -> str:
    """A value of a record as text: an id, which may also be a number.

    Raises:
        DataError: it is a list or an object.
    """
    if isinstance(value, (Mapping, list)):
        raise DataError(f"{where}: the field {name!r} must be a text or a number, not {type(value).__name__}.")
    return str(value)


def _csv_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The location of the end of each row, for messages, and the row's fields. Empty rows are skipped."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if row:
                yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not valid CSV: {error}.") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}.") from None
    except RecursionError:
        raise DataError(f"{where}: the JSON is nested too deeply to be read.") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where} cannot be read as JSON: {error}.") from None


def _checked(value: Any, text: str, where: str) -> Any:
    """Return a value parsed from JSON if none of its strings has a lone surrogate, which tokenizers cannot encode.

    Raises:
        DataError: a string has a lone surrogate.
    """
    if r"\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(f"{where}: a string contains {half!a}, half of a surrogate pair.") from None
        except RecursionError:
            raise DataError(f"{where}: the JSON is nested too deeply to be read.") from None
    return value
