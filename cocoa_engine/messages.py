"""Rejected options in words: one line that names each, says what is wrong with it and what was given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


def explain(error: ValidationError) -> str:
    """The faults that pydantic found, in one line."""
    lines = []
    for fault in error.errors():
        message = fault["msg"].removeprefix("Value error, ")
        name = ".".join(str(part) for part in fault["loc"])
        # without a name it is a message that was put into words before
        lines.append(f"{name}: {message} (got {fault['input']!r})" if name else message)
    return "; ".join(lines)


def unknown(names: Iterable[str], known: Iterable[str], *, what: str) -> str:
    """That some names are unknown, with the nearest known one to each."""
    known = list(known)
    faults = ", ".join(f"{what} {name!r}{did_you_mean(name, known)}" for name in names)
    return f"unknown {faults}; known are {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest known name, or nothing."""
    close = difflib.get_close_matches(str(name), list(known), n=1)  # what was given may be no text
    return f" (did you mean {close[0]!r}?)" if close else ""
