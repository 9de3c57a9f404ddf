"""The risk of answers from elsewhere, as rows of JSON lines; the implementation of ``cocoa score --jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocoa_engine.config import CocoaConfig
from cocoa_engine.datasets.files import read_text
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
    # str.splitlines would also split at characters that may occur inside a JSON string
    lines = [line for line in read_text(given).split("\n") if line.strip()]
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
            except (CocoaError, ValueError, RecursionError) as error:
                failed += 1
                row["error"] = f"row {number}: {error}"
            file.write(_line(row) + "\n")
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


def _finite(value: float | None) -> float | None:
    return None if value is None or value - value != 0 else value
