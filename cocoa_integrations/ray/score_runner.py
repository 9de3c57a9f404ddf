"""``cocoa score --ray``: the rows of a file, shared among actors."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine import CocoaConfig, __version__
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.score import read_rows, scored_row, writing
from cocoa_engine.errors import ConfigError, DataError
from cocoa_engine.model.load_options import LoadOptions
from cocoa_engine.output_files import locked
from cocoa_integrations.evaluation.files import append_lines, read_lines
from cocoa_integrations.ray.pool import Pool

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

WHAT = "cocoa score --ray"


def score(
    load: LoadOptions,
    given: Path,
    out: Path,
    config: CocoaConfig,
    *,
    actors: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[int, int]:
    """Score the rows of a file with many engines. The result is that of one engine, row by row.

    Finished rows are kept beside ``out``, in a file that ends in ``.partial``, until all are done. Repeating an
    interrupted call scores only the others.

    Args:
        load: how the model is loaded.
        given: the file to read: Parquet, or one JSON object a line.
        out: the file to write.
        config: the settings.
        actors: the largest number of engines.
        num_cpus: CPU cores of each.
        num_gpus: GPUs of each.
        threads: threads of each.
        progress: that of the command.

    Returns:
        The number of rows with an error, and of all rows.

    Raises:
        ConfigError: the file of finished rows is of another run.
        DataError: the file cannot be read, or has no rows.
    """
    lines = read_rows(given)
    pool = Pool.of(load, actors, num_cpus, num_gpus, threads)
    partial_file = out.with_name(f"{out.name}.partial")
    with locked(out):
        done = _finished(partial_file, _settings(pool.load, lines, config))
        if missing := [number for number in range(1, len(lines) + 1) if number not in done]:
            shown = (progress or Progress("score")).stage("scoring", "rows", len(lines))
            with shown as stage, pool.open(WHAT) as run:
                stage.resume()
                stage.at(len(done), len(lines))
                work = [(number, lines[number - 1]) for number in missing]
                for index, (line, failed) in run(work, partial(_score, config)):
                    done[missing[index]] = (line, failed)
                    append_lines(partial_file, [{"number": missing[index], "line": line, "failed": failed}])
                    stage.advance()
        with writing(out) as write:
            for number in range(1, len(lines) + 1):
                write(done[number][0])
        partial_file.unlink()
    return sum(failed for _, failed in done.values()), len(lines)


def _score(config: CocoaConfig, engine: CocoaEngine, work: tuple[int, str]) -> tuple[str, bool]:
    number, line = work
    return scored_row(engine, number, line, config)


def _settings(load: LoadOptions, lines: list[str], config: CocoaConfig) -> dict[str, Any]:
    """What rows of one run have in common."""
    return {
        "version": __version__,
        "model": load.model_name,
        "dtype": str(load.dtype),
        "calibrator": load.calibrator,
        "rows": sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest(),
        "settings": config.model_dump(mode="json"),
    }


def _finished(file: Path, settings: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """The finished rows by number, from a file that begins with the settings of its run. It is created."""
    there = read_lines(file)
    if not there:
        append_lines(file, [settings])
        return {}
    first, *rows = there
    if first != settings:
        names = ", ".join(name for name in settings if first.get(name) != settings[name])
        raise ConfigError(
            f"{file} has rows of an interrupted run with other settings ({names}): delete it, name another --out, or "
            "repeat that run"
        )
    try:
        return {int(row["number"]): (str(row["line"]), bool(row["failed"])) for row in rows}
    except (KeyError, TypeError, ValueError, OverflowError):  # OverflowError: the number is Infinity
        raise DataError(f"{file} is not a file of finished rows; it was changed") from None
