"""The terminal rendering as an SVG picture. It references no web font, so opening it fetches nothing."""

from __future__ import annotations

import io
import re
import shlex
import textwrap
from collections.abc import Sequence

from rich.console import Console

from cocoa_engine.rendering.inputs import Answer
from cocoa_engine.rendering.terminal import report
from cocoa_engine.safe_text import safe

WIDTH = 92
"""The width of the picture, in text columns."""


def document(answers: Sequence[Answer], *, title: str | None = None, table: bool = False) -> str:
    """A picture of a terminal that shows :func:`~cocoa_engine.rendering.terminal.report`.

    Args:
        answers: at least one; several are shown side by side.
        title: the prompt, for the window's title bar.
        table: add every candidate of every risk point.
    """
    console = Console(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(report(answers, table=table))
    command = "cocoa ask" if title is None else f"cocoa ask {shlex.quote(safe(title))}"
    picture = console.export_svg(title=textwrap.shorten(command, WIDTH - 10, placeholder=" …"))
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
