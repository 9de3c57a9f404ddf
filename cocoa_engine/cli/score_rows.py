"""The risk of answers from elsewhere, as rows of JSON lines or Parquet: ``cocoa score --rows``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, BinaryIO

from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import on_interrupt
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CocoaError, ConfigError, DataError
from cocoa_engine.lab.files import read_parquet, read_text
from cocoa_engine.methods import METHODS
from cocoa_engine.optional import need
from cocoa_engine.output_files import draft_of, is_stream
from cocoa_engine.rendering.verdict import verdict

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine, Generation


def score_rows(
    engine: CocoaEngine, given: Path, out: Path, config: CocoaConfig, *, progress: Progress | None = None
) -> tuple[int, int]:
    """Score the rows of a file, and write them with their risk. The file is replaced when all rows are scored.

    A row is an object with ``prompt`` and ``text``; ``source``, if given, is a part of the prompt. What else it has is
    kept. ``risk`` is added, or ``error`` if the row cannot be scored.

    Args:
        engine: the engine.
        given: the file to read: Parquet, or one JSON object a line. Empty lines are left out.
        out: the file to write: Parquet if it is named so, otherwise JSON lines.
        config: the settings.
        progress: that of the command.

    Returns:
        The number of rows with an error, and of all rows.

    Raises:
        DataError: the file cannot be read, has no rows, or is not text.
    """
    lines, failed = read_rows(given), 0
    tracked = (progress or Progress("score")).track("scoring", "rows", lines)
    with writing(out) as write:
        for number, line in enumerate(tracked, start=1):
            scored, has_error = scored_row(engine, number, line, config)
            failed += has_error
            write(scored)
    return failed, len(lines)


def read_rows(file: Path) -> list[str]:
    """The rows of a file, each as JSON. Empty lines are left out; a line need not be JSON.

    Raises:
        DataError: the file cannot be read, has no rows, or is not text.
    """
    if _is_parquet(file):
        lines = [json.dumps(dict(row), ensure_ascii=False, default=str) for _, row in read_parquet(file)]
    else:
        # str.splitlines would also split at characters that may occur inside a JSON string
        lines = [line for line in read_text(file).split("\n") if line.strip()]
    if not lines:
        raise DataError(f"{file} has no rows.")
    return lines


def scored_row(engine: CocoaEngine, number: int, line: str, config: CocoaConfig) -> tuple[str, bool]:
    """A row with its risk or its error as a JSON line, and whether it has an error.

    Args:
        engine: the engine.
        number: the number of the row, from 1.
        line: the row, from :func:`read_rows`.
        config: the settings.
    """
    row: dict[str, Any] = {}
    try:
        row = _row(line)
        source = row.get("source")
        scored = engine.score(
            row["prompt"],
            row["text"],
            config=config,
            divide=divides(config),
            source=None if source is None else [source],
        )
        row["risk"] = risk_of_row(scored)
    except (CocoaError, ValueError, RecursionError) as error:
        row["error"] = f"row {number}: {error}"
        return _line(row), True
    return _line(row), False


@contextmanager
def writing(out: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a row, given as JSON. At the end the rows become the file.

    After an error or an interruption, the file is as it was, and the JSON lines so far are in ``NAME.incomplete``. A
    pipe gets each row at once.

    Raises:
        ConfigError: the file is Parquet, and a pipe.
        MissingExtraError: the file is Parquet, and pyarrow is not installed.
    """
    streams = is_stream(out)
    if _is_parquet(out):
        if streams:
            raise ConfigError(f"{out} is a pipe or a device, to which Parquet cannot be written; name a .jsonl file")
        need("pyarrow.parquet", extra="eval", what="writing parquet files")
    with draft_of(out) as draft:
        rows, rest = 0, out if streams else Path(draft.name).with_name(f"{out.name}.incomplete")

        def write(line: str) -> None:
            nonlocal rows
            draft.write(f"{line}\n".encode())
            draft.flush()
            rows += 1

        try:
            with on_interrupt(lambda: f"{rows} rows are kept in {rest}" if rows else "no row was scored"):
                yield write
        except BaseException:
            if rows and not streams:
                draft.close()
                os.replace(draft.name, rest)
            raise
        if _is_parquet(out):
            _to_parquet(draft)


def divides(config: CocoaConfig) -> bool:
    """Whether the method scores the parts of a text; `dola`, `decore` and `diver` score it as one span."""
    return not METHODS[config.method].needs_own_passes


def risk_of_row(generation: Generation) -> dict[str, Any]:
    """The output of one answer as plain values. A number that is not finite is `None`.

    The attention is the mean over the spans with visible text.
    """
    visible = [span for span in generation.spans if span.text.strip()]
    return {
        "verdict": verdict(generation),
        "answer_risk": _finite(generation.answer_risk),
        "answer_threshold": generation.answer_threshold,
        "max_risk": _finite(generation.max_risk),
        "threshold": generation.threshold,
        "risk_source": generation.risk_source,
        "out_of_domain": generation.out_of_domain,
        "source_attention": _mean(span.source_attention for span in visible),
        "passage_attention": _mean(mean(span.passage_attention) for span in visible if span.passage_attention),
        "check": [{**one.model_dump(), "risk": _finite(one.risk)} for one in generation.check_these()],
        "sentences": [{"start": one.start, "end": one.end, "risk": _finite(one.risk)} for one in generation.sentences],
    }


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


def _to_parquet(draft: BinaryIO) -> None:
    """Replace JSON lines by the same rows as Parquet. What a row lacks is null."""
    import pyarrow
    from pyarrow import parquet

    draft.seek(0)
    rows = [json.loads(line) for line in draft]
    columns = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows])
    draft.seek(0)
    draft.truncate()
    parquet.write_table(table, draft)


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise DataError("it is not a JSON object")
    for key in ("prompt", "text", "source"):
        if not isinstance(row.get(key), str) and (key != "source" or row.get(key) is not None):
            raise DataError(f"{key!r} must be a text")
    return row


def _line(row: dict[str, Any]) -> str:
    """A row as JSON. A lone surrogate, which a file cannot hold, stays escaped."""
    try:
        text = json.dumps(row, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(row)
    except RecursionError:
        return json.dumps({"error": row["error"]}, ensure_ascii=False)
    return text


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the measured values; `None` without any."""
    known = [value for value in values if value is not None]
    return _finite(mean(known)) if known else None


def _finite(value: float | None) -> float | None:
    return None if value is None or value - value != 0 else value
