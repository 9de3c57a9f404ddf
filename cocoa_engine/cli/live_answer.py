"""An answer on the terminal while it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cocoa_engine.cli.prefill_progress import first_span, is_long
from cocoa_engine.results import Generation
from cocoa_engine.spans import Span

if TYPE_CHECKING:
    from cocoa_engine import SpanStream


def decode_live(
    stream: SpanStream, console: Console, spans: list[Span], drawn: Callable[[Sequence[Span]], Text], *, draws: bool
) -> Generation:
    """Decode an answer and show it as it grows; what was shown is cleared at the end.

    Args:
        stream: the stream of the answer.
        console: where it is shown.
        spans: receives every span, so that the caller has them after an interrupt.
        drawn: how the spans so far are drawn.
        draws: whether anything is shown, which needs a terminal that can redraw lines.
    """
    first = first_span(stream, console) if draws and is_long(stream) else []
    with _screen(console, draws=draws) as draw:
        for span in chain(first, stream):
            spans.append(span)
            draw(drawn(spans))
    assert stream.generation is not None
    return stream.generation


@contextmanager
def _screen(console: Console, *, draws: bool) -> Iterator[Callable[[Text], None]]:
    """Yield a function that replaces the answer shown so far. It does nothing if lines cannot be redrawn."""
    if not draws:
        yield lambda text: None
        return
    with Live(Text("…"), console=console, auto_refresh=False, transient=True) as live:

        def draw(text: Text) -> None:
            lines = text.wrap(console, console.width)[-(console.height - 1) :]  # only the last screenful
            live.update(Text("\n").join(lines), refresh=True)

        yield draw
