"""The progress of a command on stderr: one bar for all its stages on a terminal, elsewhere a line every 10 seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.output import can_redraw, live, on_interrupt, progress_console
from cocoa_engine.safe_text import safe

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
            self.at(self._counted(), self.total)
        return self._done

    def advance(self, count: int = 1) -> None:
        """Count items that were done since the last call."""
        self.at(self._done + count, self.total)

    def at(self, done: int, total: int) -> None:
        """Set the number of items done, and of all items."""
        now = time.monotonic()
        if done > self._done:
            self._samples.append((now - self.since, done - self._done))
            self.since = now
        self._done, self.total = done, total

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
