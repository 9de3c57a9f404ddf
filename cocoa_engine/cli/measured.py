"""Labelled data of a command, and what it measures, which is kept until the same command, given again, has ended."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from filelock import FileLock

from cocoa_engine import __version__
from cocoa_engine.cli.output import Progress, print_note
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import safe_logger
from cocoa_engine.files import cache_directory, is_private, private_folder
from cocoa_engine.lab.data import FORMATS, LabelledText, checked, read_labelled, sample
from cocoa_engine.rendering.wording import count

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.lab.cache import CacheFolder
    from cocoa_engine.lab.measured import TeacherForced

logger = safe_logger(__name__)

FOLDER = "unfinished"
KEPT = 4
"""The number of unfinished commands that are kept, those that were given last."""

LOCK = ".lock"  # beside the folder of a command
_OF_OUTPUT = ("overwrite", "json", "no_color", "debug")  # a command continues with or without them

DataPath = Annotated[Path, typer.Option("--data", help="A labelled data set: a file or a folder.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="|".join(FORMATS), help="The format of the data. Default: detected.", show_default=False
    ),
]
Prompts = Annotated[
    int | None,
    typer.Option(min=2, max=10**7, help="Use the answers to this many prompts, drawn at random. Default: all."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Use the model's chat template instead of a plain-text prompt.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        file_okay=False,
        help="Keep what is measured of each answer in this folder for good, for other commands too. Without it, an "
        "interrupted command continues when it is given again.",
        show_default=False,
    ),
]
Draws = Annotated[int, typer.Option(min=20, max=100_000, help="Number of bootstrap draws.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of all random draws.")]


def read(path: Path, format: str | None, prompts: int | None, seed: int) -> list[LabelledText]:
    return checked(sample(read_labelled(path, format), prompts, seed), path)


@contextmanager
def teacher_forced(
    engine: CocoaEngine,
    records: list[LabelledText],
    config: CocoaConfig,
    *,
    cache: CacheFolder | None,
    progress: Progress,
    **options: Any,
) -> Iterator[Iterator[TeacherForced]]:
    """Feed answers as a stage, with options of :func:`~cocoa_engine.lab.measured.force`."""
    from cocoa_engine.lab.measured import force

    with progress.stage("feeding answers", "answers", len(records), fate=partial(fate, cache)) as stage:
        yield force(engine, records, config, cache=cache, advance=stage.advance, **options)


@contextmanager
def measured_answers(context: typer.Context, cache: Path | None) -> Iterator[CacheFolder | None]:
    """The folder in which a command keeps what it measures.

    Without ``--cache`` it is one in the cache directory, for the same options in the same working directory. It is
    removed when the block has ended without an error, or before anything was measured. `None` if it cannot be written,
    is not private, or another process measures the same.
    """
    from cocoa_engine.lab.cache import CacheFolder

    if cache is not None:
        yield CacheFolder(cache)
        return
    try:
        path, lock = _begin(context)
    except (OSError, RuntimeError) as error:  # also a Timeout: another process has the lock
        logger.info("what is measured is not kept in the cache directory: %s", error)
        yield None
        return
    folder = CacheFolder(path, required=False)
    if measurements := folder.answers():
        print_note(f"continuing an interrupted command: {count(measurements, 'measurement')} are in {path}")
    has_ended = False
    try:
        yield folder
        has_ended = True
    except typer.Exit:  # the results are written, and the exit code says what they are worth
        has_ended = True
        raise
    finally:
        if has_ended or not folder.answers():
            _remove(path)
        lock.release()


def fate(folder: CacheFolder | None) -> str:
    """What becomes of what was measured when Ctrl-C ends a command."""
    if folder is None or not folder.answers():
        return "they are lost, and nothing was written"
    if folder.error is not None:
        return f"some are lost: {folder.error}"
    again = "" if folder.required else "; give the same command again to continue"
    return f"they are kept in {folder.path}{again}"


def _begin(context: typer.Context) -> tuple[Path, FileLock]:
    """The folder of a command and its lock, which this process has. Older folders are removed."""
    # the paths among the options may be relative to the working directory
    options = {name: value for name, value in context.params.items() if name not in _OF_OUTPUT}
    command = json.dumps([context.info_name, options, os.getcwd(), __version__], sort_keys=True, default=str)
    root = cache_directory() / FOLDER
    folder = root / sha256(command.encode()).hexdigest()[:32]
    is_old = folder.exists() and not is_private(folder)
    private_folder(root, 0o700)
    lock = FileLock(folder.with_suffix(LOCK))
    lock.acquire(timeout=0)
    if is_old:
        logger.warning("other users could write to %s; what is in it is measured again", folder)
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    os.utime(folder)
    others = sorted((child for child in root.iterdir() if child.is_dir() and child != folder), key=os.path.getmtime)
    for old in others[: 1 - KEPT or None]:
        with suppress(OSError, RuntimeError), FileLock(old.with_suffix(LOCK)).acquire(timeout=0):
            _remove(old)
    return folder, lock


def _remove(folder: Path) -> None:
    """Remove the folder of a command. The caller has its lock."""
    with suppress(OSError):
        shutil.rmtree(folder)
        folder.with_suffix(LOCK).unlink()
