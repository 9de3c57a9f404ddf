"""One-line messages about rejected options: the name of each, what is wrong with it, and the given value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

from cocoa_engine.safe_text import safe, short_repr, shortened

LISTED = 4  # number of errors that a message lists; it counts the others


def explain(error: ValidationError) -> str:
    """The first errors of a pydantic validation in one line, with shortened values."""
    lines = []
    details = error.errors(include_url=False, include_context=False)
    for detail in details[:LISTED]:
        message = shortened(detail["msg"].removeprefix("Value error, "), 400)
        name = shortened(".".join(str(part) for part in detail["loc"]), 120)
        # errors without a location have complete messages
        lines.append(f"{name}: {message} (got {short_repr(detail['input'])})" if name else message)
    if len(details) > LISTED:
        lines.append(f"and {len(details) - LISTED} more errors")
    return safe("; ".join(lines))


def unknown(names: Iterable[str], choices: Iterable[str], *, what: str) -> str:
    """A message about unknown names, with the closest known name for each."""
    choices, names = list(choices), list(names)
    listed = ", ".join(f"{what} {short_repr(name)}{did_you_mean(name, choices)}" for name in names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} more"
    return f"unknown {listed}; known are {', '.join(choices)}"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` with the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(name)[:100], list(choices), n=1)  # the given name may not be a string
    return f" (did you mean {close[0]!r}?)" if close else ""
