"""What the commands that read labelled data share: their options, and feeding the answers with a progress bar."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from cocoa_engine.config import CocoaConfig
from cocoa_engine.embedded import MODEL_NAME
from cocoa_engine.errors import ConfigError
from cocoa_engine.labelled import FORMATS, LabelledText, checked, read_labelled, sample

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.signal.segments import Forced

DataPath = Annotated[Path, typer.Option("--data", help="A labelled data set: a file or a folder.")]
Format = Annotated[
    str | None,
    typer.Option("--format", metavar="|".join(FORMATS), help="Its format. Default: found out.", show_default=False),
]
Prompts = Annotated[
    int | None, typer.Option(min=2, help="Take the answers to this many prompts, drawn at random. Default: all.")
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Ask through the model's chat template instead of as a text to continue.")
]
Draws = Annotated[int, typer.Option(min=20, help="Samples of the bootstrap.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")]


def read(path: Path, format: str | None, prompts: int | None, seed: int) -> list[LabelledText]:
    """The labelled answers that a command asks for.

    Raises:
        DataError: they cannot be read, or have one class only.
    """
    records = sample(read_labelled(path, format), prompts, seed)
    return checked(records, path)


@contextmanager
def fed(
    engine: CocoaEngine,
    records: list[LabelledText],
    config: CocoaConfig,
    *,
    chat: bool,
    bare: bool = False,
    grow: bool = False,
) -> Iterator[Iterator[Forced]]:
    """The answers as :func:`~cocoa_engine.signal.segments.force` feeds them, with a progress bar on stderr."""
    from cocoa_engine.signal.segments import force

    with progress("Feeding answers", len(records)) as advance:
        yield force(engine, records, config, chat=chat, bare=bare, grow=grow, advance=advance)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; what is yielded is told of each step."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def make_folder(folder: Path) -> None:
    """Make a folder for results.

    Raises:
        ConfigError: that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written to: {error.strerror}") from error


def short_name(model: str | None) -> str:
    """The last part of a model's name, for files that are named after it."""
    return (model or MODEL_NAME).rstrip("/").rpartition("/")[2]


def command_line() -> str:
    """The command as it was given, the program's name without its folder."""
    return shlex.join(["cocoa", *sys.argv[1:]])
