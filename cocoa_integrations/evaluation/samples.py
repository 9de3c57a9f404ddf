"""The folder of an evaluation: ``settings.json``, and ``samples.jsonl`` with a line for each sample of each arm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cocoa_engine.errors import ConfigError, DataError
from cocoa_engine.lab.files import read_json
from cocoa_engine.messages import explain
from cocoa_engine.output_files import LOCK, locked, write_file
from cocoa_integrations.evaluation.files import json_lines, read_lines

SETTINGS, SAMPLES, RESULTS, TABLE = "settings.json", "samples.jsonl", "results.json", "table.md"
_INCREASABLE = "limit"  # a resumed run may raise it: the samples of the earlier run are then its first samples

Row = dict[str, Any]
"""A line of ``samples.jsonl``."""

Rows = dict[tuple[str, str], Row]
"""Rows by arm and sample id."""


_Finite = Annotated[float, Field(ge=-1e100, le=1e100)]
"""Sums of larger numbers might not be finite."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)  # the values are used as they are in the file


class _Row(_Strict):
    arm: str
    id: str
    sample: str
    method: str
    metric: str | None
    alpha: float | None
    question: str
    context: str
    references: list[str]
    incorrect: list[str]
    answer: str
    metrics: Annotated[dict[str, _Finite], Field(min_length=1)]

    @model_validator(mode="after")
    def _has_both_or_none(self) -> _Row:
        if (self.metric is None) != (self.alpha is None):
            raise ValueError("metric and alpha belong together")
        return self


class _Model(_Strict):
    name: str


class _Decoding(_Strict):
    middle_layers: Annotated[list[int], Field(min_length=2, max_length=2)] | None


class _Run(_Strict):
    task: str
    model: _Model
    decoding: _Decoding


@contextmanager
def new_run(path: Path, settings: Mapping[str, Any]) -> Iterator[Rows]:
    """Open the folder of a run, new or existing, exclusively for this process, and yield the rows that it has.

    A folder without rows, for example because the model could not be loaded, can be used with other settings.

    Raises:
        ConfigError: the folder contains a run with other settings or other files, another process is using it, or it
            cannot be written.
        DataError: its files were changed after they were written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        raise ConfigError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    with locked(path):
        rows = _read_rows(path / SAMPLES)
        _claim(path, json.loads(json.dumps(settings)), begun=bool(rows))
        yield rows


@contextmanager
def finished_run(path: Path) -> Iterator[tuple[dict[str, Any], Rows]]:
    """Open the folder of an existing run, and yield its settings and its rows.

    Raises:
        ConfigError: the folder contains no run, or another process is using it.
        DataError: it has no answers, or its files were changed after they were written.
    """
    if not (path / SETTINGS).is_file():
        raise ConfigError(f"{path} contains no run: it has no {SETTINGS}; name the --out folder of a `cocoa eval`")
    with locked(path):
        settings = _read_settings(path / SETTINGS)
        try:
            _Run.model_validate(settings)
        except ValidationError as error:
            raise DataError(f"{path / SETTINGS} does not contain the settings of a run: {explain(error)}") from None
        rows = _read_rows(path / SAMPLES)
        if not rows:
            raise DataError(f"{path} has no answers yet: its {SAMPLES} is empty; run `cocoa eval` first")
        yield settings, rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the rows of a folder as a whole."""
    write_file(path / SAMPLES, json_lines(rows))


def _claim(path: Path, settings: dict[str, Any], *, begun: bool) -> None:
    file = path / SETTINGS
    if file.exists():
        there = _read_settings(file)
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


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        there = read_json(file)
    except DataError as error:
        raise DataError(f"{error} Name another folder") from error
    if not isinstance(there, dict):
        raise DataError(f"{file} does not contain the settings of a run; name another folder")
    return there


def _read_rows(file: Path) -> Rows:
    rows: Rows = {}
    for number, row in enumerate(read_lines(file), start=1):
        try:
            _Row.model_validate(row)
        except ValidationError:
            raise DataError(f"{file}, line {number}: not a row of a run; the file was changed") from None
        if (key := (row["arm"], row["id"])) in rows:
            raise DataError(f"{file}, line {number}: {key[0]}, sample {key[1]!r}, occurs twice; it was changed")
        rows[key] = row
    return rows
