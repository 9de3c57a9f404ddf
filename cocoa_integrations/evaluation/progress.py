"""The progress of a run on stderr: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cocoa_engine.cli.terminal import progress_console

SECONDS_BETWEEN_LINES = 30.0
"""Where stderr is no terminal, a line is printed after at least this many seconds."""

Reports = tuple[Callable[[int, int], None], Callable[[int], None]]


@contextmanager
def progress_bar(name: str) -> Iterator[Reports]:
    """Yield the functions that start the progress (with done and total) and advance it.

    A bar is drawn from the first advance. Until then, the loader of the model may draw its own spinner.
    """
    if not sys.stderr.isatty():
        yield _lines(name)
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=progress_console(),
        transient=True,
    )
    bar = progress.add_task(name, total=None)

    def advance(count: int) -> None:
        progress.start()
        progress.advance(bar, count)

    try:
        yield lambda done, total: progress.update(bar, completed=done, total=total), advance
    finally:
        progress.stop()


def _lines(name: str) -> Reports:
    """The same as plain lines, such as ``nq: 40 of 200, 0:02:10 elapsed, 0:08:40 left``."""
    started = printed = time.monotonic()
    before = done = total = 0

    def begin(already: int, of: int) -> None:
        nonlocal started, before, done, total
        started = time.monotonic()
        before, done, total = already, already, of

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        now = time.monotonic()
        if now - printed >= SECONDS_BETWEEN_LINES:
            printed = now
            left = (now - started) / max(1, done - before) * (total - done)
            times = [str(timedelta(seconds=round(seconds))) for seconds in (now - started, left)]
            print(f"{name}: {done} of {total}, {times[0]} elapsed, {times[1]} left", file=sys.stderr, flush=True)

    return begin, advance
