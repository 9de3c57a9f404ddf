"""The folder of a run. An interrupted run is resumed from it, and different runs cannot be mixed in it.

``settings.json`` describes the run and is written first. ``samples.jsonl`` gets one line for each sample of each arm.
``results.json`` and ``table.md`` are computed from both at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cocoa_engine.datasets.files import as_object, parse_json, read_json
from cocoa_engine.errors import ConfigError, DataError, safe_cause
from cocoa_engine.messages import explain
from cocoa_engine.output_files import LOCK, append, locked, open_in_place, write_file

SETTINGS, SAMPLES, RESULTS, TABLE = "settings.json", "samples.jsonl", "results.json", "table.md"
_TEXTS = ("arm", "id", "sample", "answer", "question", "context", "method")
_KINDS = {**dict.fromkeys(_TEXTS, str), "metrics": dict, "references": list, "incorrect": list}
_COLUMNS = {*_KINDS, "metric", "alpha"}
_LARGEST = 1e100  # of a metric; sums of larger ones might not be finite
_INCREASABLE = "limit"  # a resumed run may raise it: the samples of the earlier run are then its first samples


class RunFolder:
    """An open folder; see :func:`open_folder`.

    Attributes:
        rows: the rows of ``samples.jsonl`` by arm and sample id.
    """

    def __init__(self, path: Path, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
        self.path = path
        self.rows = rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. On return they have been written to disk.

        Raises:
            ValueError: there is already a row of this arm and sample.
        """
        added = [dict(row) for row in rows]
        for row in added:
            if _key(row) in self.rows:
                raise ValueError(f"there is already a row of {_key(row)}")
        append_lines(self.path / SAMPLES, added)
        self.rows.update({_key(row): row for row in added})

    def sort(self, keys: Sequence[tuple[str, str]]) -> None:
        """Put the rows in an order. ``samples.jsonl`` is replaced as a whole.

        Args:
            keys: the arm and sample id of each row.
        """
        self.rows = {key: self.rows[key] for key in keys}
        self.write(SAMPLES, _lines(self.rows.values()))

    def write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        write_file(self.path / name, text)


@contextmanager
def open_folder(path: Path, settings: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Open the folder of a run, new or existing, exclusively for this process.

    An incomplete last line of an interrupted run is removed, and its sample is measured again. A folder without
    samples, for example because the model could not be loaded, can be used with other settings.

    Raises:
        ConfigError: the folder contains a run with other settings or other files, another process is using it, or it
            cannot be written.
        DataError: ``samples.jsonl`` was changed after it was written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    with locked(path):
        rows = _rows(path / SAMPLES)
        _claim(path, json.loads(json.dumps(settings)), begun=bool(rows))
        yield RunFolder(path, rows)


@contextmanager
def reopen_folder(path: Path) -> Iterator[tuple[RunFolder, dict[str, Any]]]:
    """Open the folder of an existing run, and return its settings too.

    Raises:
        ConfigError: the folder contains no run, or another process is using it.
        DataError: it has no answers, or its files were changed after they were written.
    """
    if not (path / SETTINGS).is_file():
        raise ConfigError(f"{path} contains no run: it has no {SETTINGS}; name the --out folder of a `cocoa eval`")
    with locked(path):
        settings = _settings(path / SETTINGS)
        try:
            _Run.model_validate(settings)
        except ValidationError as error:
            raise DataError(f"{path / SETTINGS} does not contain the settings of a run: {explain(error)}") from None
        rows = _rows(path / SAMPLES)
        if not rows:
            raise DataError(f"{path} has no answers yet: its {SAMPLES} is empty; run `cocoa eval` first")
        yield RunFolder(path, rows), settings


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)  # the values are used as they are in the file


class _Model(_Strict):
    name: str


class _Decoding(_Strict):
    middle_layers: Annotated[list[int], Field(min_length=2, max_length=2)] | None


class _Run(_Strict):
    """What is read again from the settings of a run."""

    task: str
    model: _Model
    decoding: _Decoding


def append_lines(file: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append values to a file of JSON lines. On return they have been written to disk."""
    append(file, _lines(values).encode())


def _lines(values: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The values of a file of JSON lines; empty if there is no file. An incomplete last line is removed from the file.

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


def _claim(path: Path, settings: dict[str, Any], *, begun: bool) -> None:
    file = path / SETTINGS
    if file.exists():
        there = _settings(file)
        if begun and (differences := list(_differences(there, settings))):
            raise ConfigError(
                f"{path} contains a run with other settings: {'; '.join(differences)}. Name another folder, or give "
                "the same settings to resume the run"
            )
        if there == settings:
            return
    elif other_files := sorted(entry.name for entry in path.iterdir() if entry.name != LOCK):
        raise ConfigError(f"{path} is not empty and contains no run ({other_files[0]}); name a new folder")
    write_file(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _differences(there: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in dict.fromkeys((*there, *now)):
        old, new = there.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new and not (name == _INCREASABLE and old is not None and (new is None or new > old)):
            yield f"{prefix}{name} is {json.dumps(old)} there, {json.dumps(new)} now"


def _settings(file: Path) -> dict[str, Any]:
    try:
        there = read_json(file)
    except DataError as error:
        raise DataError(f"{error} Name another folder") from error
    if not isinstance(there, dict):
        raise DataError(f"{file} does not contain the settings of a run; name another folder")
    return there


def _rows(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number, row in enumerate(read_lines(file), start=1):
        if not _is_row(row):
            raise DataError(f"{file}, line {number}: not a row of a run; the file was changed")
        if _key(row) in rows:
            raise DataError(f"{file}, line {number}: {row['arm']}, sample {row['id']!r}, occurs twice; it was changed")
        rows[_key(row)] = row
    return rows


def _is_row(row: Mapping[str, Any]) -> bool:
    return (
        row.keys() >= _COLUMNS
        and all(isinstance(row[name], kind) for name, kind in _KINDS.items())
        and (
            (row["metric"] is None and row["alpha"] is None)
            or (isinstance(row["metric"], str) and _number(row["alpha"]))
        )
        and all(isinstance(text, str) for text in (*row["references"], *row["incorrect"]))
        and all(map(_number, row["metrics"].values()))
    )


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _LARGEST


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["arm"], row["id"]
