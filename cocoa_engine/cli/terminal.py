"""The output of commands: the console, notes on stderr, and JSON."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from cocoa_engine.errors import MESSAGE_LIMIT, CocoaError
from cocoa_engine.safe_text import bounded, safe, safe_json

BAD_INPUT = 2
"""The exit code of errors that other input, options or settings avoid."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. It ends a command as Ctrl-C does, and a chat too."""


class SafeConsole(Console):
    """A console that shows control characters in the text that it prints, such as those in a model's name."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The text and the console's own control codes that draw something."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else safe(text), style, control)


def output(no_color: bool) -> Console:
    """The console on stdout. Without colour it writes no styles at all, not even bold."""
    plain = no_color or bool(os.environ.get("NO_COLOR"))
    return SafeConsole(color_system=None if plain else "auto", markup=False, emoji=False, highlight=False)


def progress_console() -> Console:
    """The console of spinners and bars on stderr, which prints nothing unless that is a terminal."""
    return SafeConsole(stderr=True, quiet=not sys.stderr.isatty())


def can_redraw(console: Console) -> bool:
    """Whether lines can be overwritten, which needs a real terminal with a cursor (not FORCE_COLOR)."""
    return console.file.isatty() and not console.is_dumb_terminal


def print_note(message: str) -> None:
    """Print one line on stderr, apart from the command's output."""
    print("cocoa:", safe(" ".join(message.split())), file=sys.stderr)


def describe_error(error: Exception) -> tuple[str, int]:
    """An error as one line of bounded length, and the exit code of a command that it ends."""
    # usage errors are typer's own, or click's in earlier versions; both have format_message
    format_message = getattr(error, "format_message", None)
    if format_message:
        return f"{bounded(format_message(), MESSAGE_LIMIT)} (see --help)", BAD_INPUT
    if isinstance(error, CocoaError):
        return str(error), BAD_INPUT
    return f"{type(error).__name__}: {bounded(str(error), MESSAGE_LIMIT)} (--debug shows where)", 1


def print_json(document: str) -> None:
    """Print one line of JSON on stdout, in UTF-8 under any locale. Control characters are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(safe_json(document))


@contextmanager
def on_interrupt(message: str | Callable[[], str]) -> Iterator[None]:
    """Print a note if Ctrl-C or SIGTERM ends the block: what becomes of the work so far."""
    try:
        yield
    except KeyboardInterrupt:
        print_note(message if isinstance(message, str) else message())
        raise
