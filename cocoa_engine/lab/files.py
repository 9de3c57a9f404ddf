"""Data files as rows. What cannot be read ends in a DataError that names the file and the line."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cocoa_engine.errors import DataError, explain, need, shortened

INFLATED_LIMIT = 2**30
"""Number of bytes to which a compressed file may grow. A small file can contain any number of them."""

_MORE = "\n"  # the key of a row's cells without a column

_ROW_BYTES = 100  # of a row, at least, when it is a Python object

Row = tuple[str, Any]
"""The location of a row, for messages, and its value: usually a dict by field or column."""


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, with or without a byte-order mark. A ``.gz`` file is decompressed."""
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path) as file:
                data = file.read(INFLATED_LIMIT + 1)
            _check_inflated(path, len(data))
        else:
            data = path.read_bytes()
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: the path contains a NUL character
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it (iconv)."
        ) from None


def suffix_of(path: Path) -> str:
    """The suffix of a data file in lower case, without that of its compression."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def read_document(path: Path) -> str:
    """Read a text file as :func:`read_text` does, with ``\\n`` at the end of every line."""
    return io.StringIO(read_text(path), newline=None).read()


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return parse_json(read_text(path), str(path))


def read_json_list(path: Path) -> Iterator[Row]:
    """Iterate over the records of a JSON file that contains a list."""
    values = read_json(path)
    if not isinstance(values, list):
        raise DataError(f"{path}: a .json file must hold a list of records, not {type(values).__name__}.")
    for number, value in enumerate(values):
        yield f"{path}, record {number}", value


def read_json_lines(path: Path) -> Iterator[Row]:
    """Iterate over the values of a JSON lines file. Empty lines are skipped."""
    # str.splitlines would also split at characters that may occur inside a JSON string
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line, where)


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Deep nesting, numbers of thousands of digits and lone surrogates, which tokenizers
    cannot encode, are refused."""
    try:
        value = json.loads(text)
        if r"\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} cannot be read as JSON: {error}.") from None
    return value


def read_csv(path: Path) -> Iterator[Row]:
    """Iterate over the rows of a CSV file with a header, each as cells by column. Empty rows are skipped."""
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""), restkey=_MORE, strict=True)
    try:
        while rows.fieldnames == []:  # empty lines before the header
            rows.fieldnames = None
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if _MORE in row or None in row.values():
                raise DataError(
                    f"{where}: the row is {'longer' if _MORE in row else 'shorter'} than the header. A field that "
                    "holds a comma needs quotes."
                )
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.reader.line_num} is not valid CSV: {error}.") from None


def read_parquet(path: Path) -> Iterator[Row]:
    """Iterate over the rows of a parquet file of at most :data:`INFLATED_LIMIT` bytes. Needs pyarrow."""
    parquet = need("pyarrow.parquet", extra="eval", what="reading parquet files")
    import pyarrow

    try:
        with parquet.ParquetFile(path) as file:
            # The size by the file's metadata, in which nulls have none. That of its columns is not read: in a damaged
            # file, it aborts the process in pyarrow.
            groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
            sizes = (max(0, group.total_byte_size) + max(0, group.num_rows * group.num_columns) for group in groups)
            _check_inflated(path, sum(sizes))
            row_size = sum(max(8, leaf.length) for leaf in file.schema)  # without texts
            most = max(1, INFLATED_LIMIT // max(1, row_size))
            _measure(path, file, min(2**16, most))
            batches = file.iter_batches(batch_size=min(1024, most))
            for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
                yield f"{path}, record {number}", row
    except DataError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}.") from None


def _measure(path: Path, file: Any, rows_at_once: int) -> None:
    """Refuse a parquet file whose values are larger than the limit, whatever its metadata says.

    A file of a kilobyte may repeat a large value a million times. Texts are therefore read as dictionaries, which have
    each value once, and their size is computed from these. Each batch copies the dictionary of its row group.
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


class RowModel(BaseModel):
    """A row of a data file, with other fields ignored."""

    model_config = ConfigDict(frozen=True)


ModelT = TypeVar("ModelT", bound=BaseModel)


def parsed(kind: type[ModelT], value: Any, where: str) -> ModelT:
    """A row as a model."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, found {type(value).__name__}.")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise DataError(f"{where}: {shortened(explain(error), 600)}.") from None
