"""The risk of answers from elsewhere, as rows of JSON lines; the implementation of ``cocoa score --jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CocoaError, DataError
from cocoa_engine.rendering.verdict import verdict

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine, Generation


def score_rows(engine: CocoaEngine, given: Path, out: Path, config: CocoaConfig) -> tuple[int, int]:
    """Score the rows of a file, and write each with its risk as soon as it is known.

    A row is an object with ``prompt`` and ``text``; ``source``, if given, is a part of the prompt. What else it has is
    kept. ``risk`` is added, or ``error`` if the row cannot be scored.

    Args:
        engine: the engine.
        given: the file to read, one JSON object a line. Empty lines are left out.
        out: the file to write.
        config: the settings.

    Returns:
        The number of rows with an error, and of all rows.

    Raises:
        DataError: the file cannot be read, has no rows, or is not text.
    """
    try:
        lines = [line for line in given.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"{given} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{given} is not text in UTF-8: {error}") from error
    if not lines:
        raise DataError(f"{given} has no rows.")
    failed = 0
    with out.open("w", encoding="utf-8") as file:
        for number, line in enumerate(lines, start=1):
            row: dict[str, Any] = {}
            try:
                row = _row(line)
                source = row.get("source")
                scored = engine.score(
                    row["prompt"], row["text"], config=config, divide=True, source=None if source is None else [source]
                )
                row["risk"] = risk_of_row(scored)
            except (CocoaError, ValueError) as error:
                failed += 1
                row["error"] = f"row {number}: {error}"
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    return failed, len(lines)


def risk_of_row(generation: Generation) -> dict[str, Any]:
    """What is said about one answer: plain values. A number that is not finite is `None`."""
    return {
        "verdict": verdict(generation),
        "answer_risk": _finite(generation.answer_risk),
        "risk_source": generation.risk_source,
        "check": [{**one.model_dump(), "risk": _finite(one.risk)} for one in generation.check_these()],
        "sentences": [{"start": one.start, "end": one.end, "risk": _finite(one.risk)} for one in generation.sentences],
    }


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise DataError("it is not a JSON object")
    for key in ("prompt", "text", "source"):
        if not isinstance(row.get(key), str) and (key != "source" or row.get(key) is not None):
            raise DataError(f"{key!r} must be a text")
    return row


def _finite(value: float | None) -> float | None:
    return None if value is None or value - value != 0 else value
