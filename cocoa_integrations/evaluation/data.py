"""The samples of a task from a data file that the user has."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from cocoa_engine.errors import ConfigError, DataError
from cocoa_integrations.evaluation.files import find_file, fingerprint, read_records
from cocoa_integrations.evaluation.tasks import Sample, find_task


def load_samples(task: str, path: str | Path, *, limit: int | None = None, shuffle: int | None = None) -> list[Sample]:
    """Read and check a whole data file, and take samples from it.

    Args:
        task: its name.
        path: a CSV, JSON, JSON lines (both also gzipped) or parquet file, or a folder that holds one.
        limit: only the first so many.
        shuffle: a seed: the samples are put into another order before ``limit`` counts them.

    Raises:
        DataError: a file cannot be read, a record lacks something, or two have one id; it says which.
        ConfigError: there is no such task, or the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 (got {limit})")
    read = find_task(task).read
    samples: list[Sample] = []
    first: dict[str, str] = {}
    for number, record in enumerate(read_records(find_file(path))):
        sample = read(record, str(number))
        if sample.id in first:
            raise DataError(f"{record.where}: the id {sample.id!r} is that of {first[sample.id]} already")
        first[sample.id] = record.where
        samples.append(sample)
    if shuffle is not None:
        random.Random(shuffle).shuffle(samples)
    return samples[:limit]


def describe_data(path: str | Path, *, shuffle: int | None = None) -> dict[str, Any]:
    """What a run's settings say of its data: the file's name, what tells its content from another's, and the shuffle.

    Raises:
        DataError: there is no such file.
    """
    file = find_file(path)
    return {"file": file.name, "sha256": fingerprint(file), "shuffle": shuffle}
