"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(name: str) -> Iterator[tuple[Callable[[int, int], None], Callable[[int], None]]]:
    """Yield the functions that start the bar (with done and total) and advance it. It is drawn from the first advance.

    Until then, the loader of the model may draw its own spinner.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    bar = progress.add_task(name, total=None)

    def advance(count: int) -> None:
        progress.start()
        progress.advance(bar, count)

    try:
        yield lambda done, total: progress.update(bar, completed=done, total=total), advance
    finally:
        progress.stop()
