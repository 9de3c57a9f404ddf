"""One-line messages about rejected options: the name of each, what is wrong with it, and the given value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


def explain(error: ValidationError) -> str:
    """The errors of a pydantic validation in one line."""
    lines = []
    for detail in error.errors():
        message = detail["msg"].removeprefix("Value error, ")
        name = ".".join(str(part) for part in detail["loc"])
        # errors without a location have complete messages
        lines.append(f"{name}: {message} (got {_short(detail['input'])})" if name else message)
    return "; ".join(lines)


def _short(value: object) -> str:
    """A value as it is written in Python, cut off if it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


LONGEST = 200
"""The number of characters of a wrong value that a message shows."""


def unknown(names: Iterable[str], known: Iterable[str], *, what: str) -> str:
    """A message about unknown names, with the closest known name for each."""
    known = list(known)
    listed = ", ".join(f"{what} {name!r}{did_you_mean(name, known)}" for name in names)
    return f"unknown {listed}; known are {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` with the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(name), list(known), n=1)  # the given name may not be a string
    return f" (did you mean {close[0]!r}?)" if close else ""
