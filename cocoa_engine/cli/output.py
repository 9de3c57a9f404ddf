"""The output of commands: the console, notes on stderr, JSON, and the files written beside it."""

import errno
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from cocoa_engine.cli.options import file_option
from cocoa_engine.errors import MESSAGE_LIMIT, CocoaError, ConfigError, bounded, need, safe, safe_json
from cocoa_engine.files import is_stream, locked, require_writable, write_file


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
    """A table without lines. Without headings it has no head. Cells that are too wide wrap, if they may."""
    heads = any(isinstance(column, str) or column.header for column in columns)
    table = Table(
        *columns, title=title, title_justify="left", title_style="", show_header=heads, box=None, padding=(0, 2, 0, 0)
    )
    for column in table.columns:
        column.overflow = "ellipsis" if column.no_wrap else "fold"
    return table


@contextmanager
def live(console: Console, **options: Any) -> Iterator[Live]:
    """A part of a terminal that is drawn over and over, and cleared at the end."""
    with Live(console=console, transient=True, **options) as part:
        console.show_cursor(True)  # it would stay hidden if the process were killed
        yield part


def print_note(message: str) -> None:
    """Print one line on stderr, apart from the command's output, which does not depend on it."""
    with suppress(OSError):  # stderr was closed, or is a file on a full disk
        print("cocoa:", safe(" ".join(message.split())), file=sys.stderr, flush=True)


def describe_error(error: Exception) -> tuple[str, int]:
    """An error as one line of bounded length, and the exit code of a command that it ends: 2 for bad input."""
    # usage errors are typer's own, or click's in earlier versions; both have format_message
    format_message = getattr(error, "format_message", None)
    if format_message:
        return f"{bounded(format_message(), MESSAGE_LIMIT)} (see --help)", 2
    if isinstance(error, CocoaError):
        return str(error), 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        # of the standard output: those of files are an OutputError
        return f"the output cannot be written: {error.strerror}", 2
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


SECONDS_BETWEEN_LINES = 10.0
"""Where stderr is no terminal, a line is printed after this many seconds, whether a step has ended or not."""

NARROWEST_BAR, NARROWEST_TEXT = 4, 20  # characters; the time is cut off before this text is

CHEAP = 0.1
"""Items that take less than this share of the usual time were in a cache. They do not count for the time left."""


class Stage:
    """A part of the work of a command.

    Args:
        name: what is done, such as ``answering``.
        unit: what is counted, in the plural; empty: nothing is counted.
        total: the number of items, if it is known.
        done: called for the number of items done, instead of :meth:`advance`.
    """

    def __init__(self, name: str, unit: str = "", total: int = 0, done: Callable[[], int] | None = None) -> None:
        self.name, self.unit, self.total = name, unit, total
        self._done, self._counted = 0, done
        self.began = self.since = time.monotonic()  # the end of the last item, or of what was done between two
        self._samples: list[tuple[float, int]] = []  # seconds, and the items that were done in them

    @property
    def done(self) -> int:
        if self._counted is not None:
            self.advance(self._counted() - self._done)
        return self._done

    def advance(self, count: int = 1) -> None:
        """Count items that were done since the last call."""
        now = time.monotonic()
        if count > 0:
            self._samples.append((now - self.since, count))
            self.since = now
        self._done += count

    def share(self) -> float:
        """The share of the items that are done, in [0, 1]."""
        return min(self.done / self.total, 1.0) if self.total else 0.0

    def seconds(self) -> float | None:
        """The time that all items take, by those that are done; `None` before the first."""
        samples = self._samples[:]
        passed = sum(seconds for seconds, _ in samples)
        if not self.total or not passed:
            return None
        usual = sum(seconds * seconds / items for seconds, items in samples) / passed
        worked = [(seconds, items) for seconds, items in samples if seconds / items >= CHEAP * usual]
        return self.total * sum(seconds for seconds, _ in worked) / sum(items for _, items in worked)


class Progress:
    """The progress of a command, which is shown while one of its stages runs.

    On a terminal that is one bar for all stages, which never goes back. Elsewhere a thread prints a line every
    :data:`SECONDS_BETWEEN_LINES`, also while a single step takes longer.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._plan: dict[str, float] = {}
        self._finished = 0.0  # of the plan
        self._pace: float | None = None  # seconds for a unit of the plan, in the last stage that had one
        self._stages: list[Stage] = []  # those that run, the innermost last
        self._printed = time.monotonic()

    def plan(self, shares: Mapping[str, float]) -> None:
        """Set the work of each stage, in any unit, by its name. Stages without a share do not move the bar."""
        self._plan = dict(shares)

    @contextmanager
    def stage(
        self,
        name: str,
        unit: str = "",
        total: int = 0,
        *,
        done: Callable[[], int] | None = None,
        fate: Callable[[], str] | None = None,
    ) -> Iterator[Stage]:
        """Show a stage while the block runs. Stages can nest. The arguments are those of :class:`Stage`.

        ``fate`` says what becomes of the items that are done, for a note if Ctrl-C ends the block.
        """
        stage = Stage(name, unit, total, done)
        note = fate and on_interrupt(lambda: f"{name}: {stage.done} of {stage.total} were done; {fate()}")
        console = progress_console()
        shown: AbstractContextManager[object] = nullcontext()
        if not self._stages and can_redraw(console):
            # what the command prints on stdout must not go through this console
            drawn = partial(self._drawn, console)
            shown = live(console, get_renderable=drawn, redirect_stdout=False, refresh_per_second=4)
        elif not self._stages:
            shown = self._lines()
        self._stages.append(stage)
        try:
            with note or nullcontext(), shown:
                yield stage
        finally:
            self._stages.pop()
            if self._stages:
                self._stages[-1].since = time.monotonic()
            share = self._plan.pop(name, 0.0)
            self._finished += share
            if share and (seconds := stage.seconds()) is not None:
                self._pace = seconds / share

    @contextmanager
    def _lines(self) -> Iterator[None]:
        ended = threading.Event()

        def print_lines() -> None:
            while not ended.wait(max(0.0, self._printed + SECONDS_BETWEEN_LINES - time.monotonic())):
                self._printed = time.monotonic()
                with suppress(OSError, ValueError):  # stderr was closed
                    print(f"{self._command}: {safe(self.describe())}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=print_lines, name="cocoa-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(1.0)  # it waits where nobody reads stderr

    def describe(self) -> str:
        """The innermost stage, and the time left for it and the later ones, or its time so far if that is not known."""
        if not (stages := self._stages[:]):
            return ""
        stage, now = stages[-1], time.monotonic()
        share, whole = self._plan.get(stage.name, 0.0), stage.seconds()
        if whole is None and self._pace is not None:  # the first item is not done
            whole = self._pace * share
        left = 0.0
        if whole:
            later = whole * (sum(self._plan.values()) - share) / share if share else 0.0
            left = max(0.0, whole * (1 - stage.share()) - (now - stage.since)) + later
        counts = f"{stage.done:,} of {stage.total:,} {stage.unit}" if stage.total else stage.name
        if not left:  # not known, or a step takes longer than those before
            return f"{counts}, {_duration(now - stage.began)} so far"
        return f"{counts}, {_duration(left)} left"

    def fraction(self) -> float | None:
        """The share of the work that is done, in [0, 1]; `None` if there is no plan and nothing is counted."""
        stages = self._stages[:]
        if whole := self._finished + sum(self._plan.values()):
            return (self._finished + sum(self._plan.get(stage.name, 0.0) * stage.share() for stage in stages)) / whole
        return stages[0].share() if stages and stages[0].total else None

    def _drawn(self, console: Console) -> Table:
        fraction = self.fraction()
        line = Table.grid(padding=(0, 1))
        line.add_column(max_width=30)  # narrower where the text needs the room
        line.add_column(no_wrap=True, overflow="crop")
        bar = ProgressBar(1.0, fraction or 0.0, pulse=fraction is None)
        what, _, seconds = safe(self.describe()).rpartition(", ")
        room = max(console.width - len(seconds) - NARROWEST_BAR - 3, NARROWEST_TEXT)
        line.add_row(bar, Text(f"{what if len(what) <= room else what[: room - 3] + '...'}, {seconds}"))
        return line


def _duration(seconds: float) -> str:
    """A time in words, such as ``90 s``, ``2 min`` or ``1 h 20 min``."""
    if seconds < 119.5:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
