"""An answer on the terminal while it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cocoa_engine.cli.progress import Progress
from cocoa_engine.results import Generation
from cocoa_engine.spans import Span

if TYPE_CHECKING:
    from cocoa_engine import SpanStream


def decode_live(
    stream: SpanStream,
    console: Console,
    spans: list[Span],
    drawn: Callable[[Sequence[Span]], Text],
    *,
    draws: bool,
    progress: Progress,
) -> Generation:
    """Decode an answer and show it as it grows; what was shown is cleared at the end.

    Args:
        stream: the stream of the answer.
        console: where it is shown.
        spans: receives every span, so that the caller has them after an interrupt.
        drawn: how the spans so far are drawn.
        draws: whether it is shown as it grows, which needs a terminal that can redraw lines.
        progress: that of the command, for a long prompt, and for an answer that is not shown as it grows.
    """
    first = first_span(stream, progress)
    with _screen(console, draws=draws) as draw, nullcontext() if draws else progress.stage("answering"):
        for span in chain(first, stream):
            spans.append(span)
            draw(drawn(spans))
    assert stream.generation is not None
    return stream.generation


def first_span(stream: SpanStream, progress: Progress) -> list[Span]:
    """Wait for the first span, if there is one, and show how much of the prompt is read, if it is long."""
    from cocoa_engine.execution.backends.shared_cache import PREFILL_CHUNK

    total = len(stream.prompt)
    if total <= PREFILL_CHUNK:  # one chunk
        return []
    with progress.stage("reading", "tokens of the prompt", total, done=lambda: stream.prompt_progress[0]):
        span = next(stream, None)
    return [] if span is None else [span]


@contextmanager
def _screen(console: Console, *, draws: bool) -> Iterator[Callable[[Text], None]]:
    """Yield a function that replaces the answer shown so far. It does nothing if lines cannot be redrawn."""
    if not draws:
        yield lambda text: None
        return
    with Live(Text("…"), console=console, auto_refresh=False, transient=True) as live:
        console.show_cursor(True)  # it would stay hidden if the process were killed

        def draw(text: Text) -> None:
            lines = text.wrap(console, console.width)[-(console.height - 1) :]  # only the last screenful
            live.update(Text("\n").join(lines), refresh=True)

        yield draw
