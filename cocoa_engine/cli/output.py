"""The output of commands: the console, notes on stderr, JSON, and the files written beside it."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Column, Table

from cocoa_engine.cli.options import file_option
from cocoa_engine.errors import CocoaError, ConfigError
from cocoa_engine.optional import need
from cocoa_engine.output_files import is_stream, locked, require_writable, write_file
from cocoa_engine.safe_text import MESSAGE_LIMIT, bounded, safe, safe_json


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


def plain_table(*columns: Column | str, title: str | None = None) -> Table:
    """A table without lines. Without headings it has no head."""
    heads = any(isinstance(column, str) or column.header for column in columns)
    return Table(
        *columns, title=title, title_justify="left", title_style="", show_header=heads, box=None, padding=(0, 2, 0, 0)
    )


@contextmanager
def live(console: Console, **options: Any) -> Iterator[Live]:
    """A part of a terminal that is drawn over and over, and cleared at the end."""
    with Live(console=console, transient=True, **options) as part:
        console.show_cursor(True)  # it would stay hidden if the process were killed
        yield part


def print_note(message: str) -> None:
    """Print one line on stderr, apart from the command's output."""
    print("cocoa:", safe(" ".join(message.split())), file=sys.stderr)


def describe_error(error: Exception) -> tuple[str, int]:
    """An error as one line of bounded length, and the exit code of a command that it ends: 2 for bad input."""
    # usage errors are typer's own, or click's in earlier versions; both have format_message
    format_message = getattr(error, "format_message", None)
    if format_message:
        return f"{bounded(format_message(), MESSAGE_LIMIT)} (see --help)", 2
    if isinstance(error, CocoaError):
        return str(error), 2
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


Svg = Annotated[Path | None, file_option("Also write the output as an SVG picture.")]
Html = Annotated[
    Path | None,
    file_option("Also write an HTML page: the riskiest claims shaded and listed, and all scores as details."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist. Without it they are refused.")]


def check_writable(*inputs: Path | None, **files: Path | None) -> None:
    """Refuse files that cannot be written, by option, or that the command reads too. Nothing is created."""

    def is_same(file: Path, other: Path) -> bool:  # one regular file, through links too
        if file.exists() and other.exists():
            return file.is_file() and file.samefile(other)
        return file.absolute() == other.absolute()

    used = [file for file in inputs if file]
    for option, file in files.items():
        if file:
            if any(is_same(file, other) for other in used):
                raise ConfigError(f"--{option} {file} is also another file of this command: name a new file")
            used.append(file)
            try:
                require_writable(file)
            except ConfigError as error:
                raise ConfigError(f"--{option} {error}") from None


def check_drawable(option: str, file: Path) -> None:
    """Refuse a file whose suffix is not a format that matplotlib can save."""
    formats = need("matplotlib.figure", extra="risk", what=f"--{option}").Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in formats:
        raise ConfigError(f"--{option} {file}: the name must end in one of {', '.join(f'.{name}' for name in formats)}")


def write(file: Path, document: str) -> None:
    """Write a document as UTF-8. A note says if a file is replaced."""
    if file.is_file() and not is_stream(file):
        print_note(f"{file} is replaced")
    write_file(file, document)


@contextmanager
def reserved(*files: Path, overwrite: bool) -> Iterator[None]:
    """Reserve the files of results while they are measured: in existing folders, for this process alone."""
    with ExitStack() as stack:
        for file in files:
            if is_stream(file):
                continue
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=file.parent).close()
            except OSError as error:
                raise ConfigError(f"the folder {file.parent} cannot be written to: {error.strerror}") from error
            if file.exists() and not overwrite:
                raise ConfigError(f"{file} exists: name another file, or replace it with --overwrite")
            require_writable(file)
            stack.enter_context(locked(file))
        yield
