"""Labelled data of a command: its options, and what the model measures of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.unfinished import fate
from cocoa_engine.config import CocoaConfig
from cocoa_engine.lab.data import FORMATS, LabelledText, checked, read_labelled, sample

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine
    from cocoa_engine.lab.cache import CacheFolder
    from cocoa_engine.lab.forced import TeacherForced

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
    """Read the labelled answers of a command."""
    return checked(sample(read_labelled(path, format), prompts, seed), path)


@contextmanager
def teacher_forced(
    engine: CocoaEngine,
    records: list[LabelledText],
    config: CocoaConfig,
    *,
    chat: bool,
    without_source: bool = False,
    layer: int | None = None,
    cache: CacheFolder | None,
    progress: Progress,
) -> Iterator[Iterator[TeacherForced]]:
    """Feed answers as a stage. ``cache`` keeps them, with the mean states of their spans at a ``layer``."""
    from cocoa_engine.lab.forced import ProfileCache, force

    options: Any = {"chat": chat, "without_source": without_source}
    fed = None if cache is None else ProfileCache(cache, engine, config, layer=layer, **options)
    with progress.stage("feeding answers", "answers", len(records), fate=partial(fate, cache)) as stage:
        yield force(engine, records, config, cache=fed, advance=stage.advance, **options)
