"""Comparing the reports that callbacks collect with those of answers."""

from __future__ import annotations

from typing import Any


def without_run(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports without the id of their run, which only callbacks, collectors and events know."""
    return [{name: value for name, value in report.items() if name != "run_id"} for report in reports]
