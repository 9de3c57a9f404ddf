"""The files that commands write beside their output: SVG pictures and HTML pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import need

Svg = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also write the output as an SVG picture.")
]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="Also write an HTML page: the riskiest claims shaded and listed, and all scores as details.",
    ),
]


def check_writable(**files: Path | None) -> None:
    """Refuse files that cannot be written, before any work is done. Existing files are replaced later.

    Args:
        **files: each file by the name of its option.

    Raises:
        ConfigError: a file cannot be written.
    """
    for option, file in files.items():
        try:
            if file:
                file.open("ab").close()
        except OSError as error:
            raise ConfigError(f"--{option} {file} cannot be written: {error.strerror}") from error


def check_drawable(option: str, file: Path) -> None:
    """Refuse a file whose suffix is not a format that matplotlib can save.

    Raises:
        ConfigError: the suffix is not supported.
        MissingExtraError: matplotlib is not installed.
    """
    known = need("matplotlib.figure", extra="risk", what=f"--{option}").Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--{option} {file}: the name must end in one of {', '.join(f'.{name}' for name in known)}")


def write(file: Path, document: str) -> None:
    """Write a document as UTF-8."""
    file.write_text(document, encoding="utf-8")
