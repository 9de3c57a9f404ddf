"""Reading the samples of a task from a local data file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from cocoa_engine.errors import ConfigError, DataError
from cocoa_integrations.evaluation.files import find_file, fingerprint, read_records
from cocoa_integrations.evaluation.tasks import Sample, find_task


def load_samples(task: str, path: str | Path, *, limit: int | None = None, shuffle: int | None = None) -> list[Sample]:
    """Read and validate a data file, and return its samples.

    Args:
        task: the name of the task.
        path: a CSV, JSON, JSON lines (both also gzipped) or parquet file, or a folder that contains one.
        limit: maximum number of samples.
        shuffle: seed for shuffling the samples before ``limit`` applies.

    Raises:
        DataError: the file cannot be read, a record is invalid, or two records have the same id.
        ConfigError: the task is unknown, or the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 (got {limit})")
    read = find_task(task).read
    samples: list[Sample] = []
    first: dict[str, str] = {}
    for number, record in enumerate(read_records(find_file(path))):
        sample = read(record, str(number))
        if sample.id in first:
            raise DataError(f"{record.where}: the id {sample.id!r} is already used by {first[sample.id]}")
        first[sample.id] = record.where
        samples.append(sample)
    if shuffle is not None:
        random.Random(shuffle).shuffle(samples)
    return samples[:limit]


def describe_data(path: str | Path, *, shuffle: int | None = None) -> dict[str, Any]:
    """The data entry of the settings of a run: the name of the file, the digest of its content, and the shuffle seed.

    Raises:
        DataError: the file does not exist.
    """
    file = find_file(path)
    return {"file": file.name, "sha256": fingerprint(file), "shuffle": shuffle}
