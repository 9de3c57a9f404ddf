"""Where a command's output goes, and in which form."""

from __future__ import annotations

import io
import os
import sys

from rich.console import Console


def output(no_color: bool) -> Console:
    """The console on stdout. Without colour it writes no styles at all, not even bold."""
    plain = no_color or bool(os.environ.get("NO_COLOR"))
    return Console(color_system=None if plain else "auto", markup=False, emoji=False, highlight=False)


def draws_on_screen(console: Console) -> bool:
    """Whether lines can be drawn over: a real terminal with a cursor, not one pretended with FORCE_COLOR."""
    return console.file.isatty() and not console.is_dumb_terminal


def say(message: str) -> None:
    """One line on stderr, where it is no part of what was asked for."""
    print("cocoa:", " ".join(message.split()), file=sys.stderr)


def print_json(document: str) -> None:
    """One line of JSON on stdout, in UTF-8 whatever the locale."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(document)
