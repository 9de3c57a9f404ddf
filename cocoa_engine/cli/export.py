"""The files that commands write beside their output: SVG pictures and HTML pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cocoa_engine.cli.dataset_options import make_folder
from cocoa_engine.cli.terminal import print_note
from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import need
from cocoa_engine.output_files import is_stream, locked, require_writable, write_file

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

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist. Without it they are refused.")]


def check_writable(*given: Path | None, **files: Path | None) -> None:
    """Refuse files that cannot be written, before any work is done. Nothing is created.

    Args:
        *given: the files that the command reads, which must not be replaced.
        **files: each file to write by the name of its option.

    Raises:
        ConfigError: a file cannot be written, is read by the command, or is named by two options.
    """
    others = [each for each in given if each]
    for option, file in files.items():
        if file:
            if any(_is_same(file, other) for other in others):
                raise ConfigError(f"--{option} {file} is also another file of this command: name a new file")
            others.append(file)
            try:
                require_writable(file)
            except ConfigError as error:
                raise ConfigError(f"--{option} {error}") from None


def _is_same(file: Path, other: Path) -> bool:
    """Whether two paths name one regular file, through links too."""
    if file.exists() and other.exists():
        return file.is_file() and file.samefile(other)
    return file.absolute() == other.absolute()


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
    """Write a document as UTF-8. A note says if a file is replaced."""
    if file.is_file() and not is_stream(file):
        print_note(f"{file} is replaced")
    write_file(file, document)


@contextmanager
def reserved(*files: Path, overwrite: bool) -> Iterator[None]:
    """Reserve the files of results while they are measured: in existing folders, for this process alone.

    Args:
        *files: the files that will be written.
        overwrite: replace those that exist.

    Raises:
        ConfigError: a file exists and ``overwrite`` is false, cannot be written, or another process writes it.
    """
    with ExitStack() as stack:
        for file in files:
            if is_stream(file):
                continue
            make_folder(file.parent)
            if file.exists() and not overwrite:
                raise ConfigError(f"{file} exists: name another file, or replace it with --overwrite")
            require_writable(file)
            stack.enter_context(locked(file))
        yield
