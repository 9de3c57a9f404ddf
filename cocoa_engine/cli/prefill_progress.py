"""A progress bar for the prefill of long prompts, before the first span of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from cocoa_engine.spans import Span

if TYPE_CHECKING:
    from cocoa_engine import SpanStream


def is_long(stream: SpanStream) -> bool:
    """Whether the prompt is prefilled in several chunks."""
    from cocoa_engine.execution.backends.shared_cache import PREFILL_CHUNK

    return len(stream.prompt) > PREFILL_CHUNK


def first_span(stream: SpanStream, console: Console) -> list[Span]:
    """Wait for the first span, if there is one, and show a progress bar of the prefill meanwhile."""
    with Live(get_renderable=lambda: bar(*stream.prompt_progress), console=console, transient=True):
        span = next(stream, None)
    return [] if span is None else [span]


def bar(read: int, total: int) -> Table:
    """One line with a progress bar and the numbers of tokens."""
    line = Table.grid(padding=(0, 1))
    line.add_row("reading the prompt", ProgressBar(total, read, width=30), f"{read:,} of {total:,} tokens")
    return line
