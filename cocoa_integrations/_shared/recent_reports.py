"""The reports of a handler that may be kept for the life of a service: a bounded number of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cocoa_engine.errors import ConfigError

MAX_REPORTS = 10_000
"""How many reports a handler keeps by default."""


def require_max_reports(max_reports: int | None) -> None:
    """Check the option of this name.

    Raises:
        ConfigError: it is neither a positive integer nor ``None``.
    """
    is_number = isinstance(max_reports, int) and not isinstance(max_reports, bool)
    if max_reports is not None and not (is_number and max_reports >= 1):
        raise ConfigError(f"max_reports takes a positive integer, or None to keep every report, not {max_reports!r}")


def add_reports(reports: list[dict[str, Any]], added: Iterable[dict[str, Any]], max_reports: int | None) -> None:
    """Append reports to a list, and drop the oldest ones that are too many."""
    reports.extend(added)
    if max_reports is not None:
        del reports[:-max_reports]
