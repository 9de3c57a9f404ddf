"""The pictures that commands write: SVG of what the terminal shows, and HTML."""

from __future__ import annotations

import io
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import need
from cocoa_engine.rendering.html import document
from cocoa_engine.results import Generation

PICTURE_WIDTH = 92  # columns

Svg = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also draw what is shown into an SVG picture.")
]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="Also write a page that shows the risk of every span, and at a touch its figures and rivals.",
    ),
]


def check_writable(**files: Path | None) -> None:
    """Refuse a file that cannot be written, before any work is done. A file that is there is replaced.

    Raises:
        ConfigError: there is one; each is named by its option.
    """
    for option, file in files.items():
        try:
            if file:
                file.open("ab").close()
        except OSError as error:
            raise ConfigError(f"--{option} {file} cannot be written: {error.strerror}") from error


def check_drawable(option: str, file: Path) -> None:
    """Refuse a file whose name says no format that a figure can be saved in.

    Raises:
        ConfigError: it is such a file.
        MissingExtraError: matplotlib is not installed.
    """
    known = need("matplotlib.figure", extra="risk", what=f"--{option}").Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--{option} {file}: its name must end in one of {', '.join(f'.{name}' for name in known)}")


def write_svg(file: Path, shown: RenderableType, prompt: str) -> None:
    """Draw a terminal window that shows something. It names no web font, so opening it fetches nothing."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=PICTURE_WIDTH,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(shown)
    title = textwrap.shorten(f"cocoa ask {shlex.quote(prompt)}", PICTURE_WIDTH - 10, placeholder=" …")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
    file.write_text(picture, encoding="utf-8")


def write_html(file: Path, generations: Sequence[Generation], prompt: str) -> None:
    """Write a page of one answer, or of several side by side."""
    file.write_text(document(generations, title=prompt), encoding="utf-8")
