"""``cocoa heads``: find a model's retrieval heads, which the method DeCoRe masks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from cocoa_engine.cli.dataset_options import short_name
from cocoa_engine.cli.export import Overwrite, reserved
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import LoadOptions, Model, with_options
from cocoa_engine.cli.terminal import on_interrupt
from cocoa_engine.errors import ConfigError
from cocoa_engine.output_files import write_file


@with_options()
def heads(
    loading: LoadOptions,
    model: Model = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The JSON file to write. Default: MODEL-heads.json here.", dir_okay=False, show_default=False
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Lengths of the texts that needles are hidden in, in tokens.")
    ] = "256,512,1024",
    overwrite: Overwrite = False,
) -> None:
    """Find a model's retrieval heads and write them to a file, for --method decore --decore-heads FILE."""
    try:
        sizes = [int(length) for length in lengths.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--lengths takes whole numbers above 0, such as 256,512 (got {lengths!r})")
    out = out or Path(f"{short_name(model)}-heads.json")
    with reserved(out, overwrite=overwrite):
        engine = load_engine(model, loading)
        from cocoa_engine.studies.retrieval_heads import find_retrieval_heads  # imports torch

        with Progress(console=Console(stderr=True)) as progress, on_interrupt("nothing was written"):
            task = progress.add_task("needles", total=None)
            found = find_retrieval_heads(
                engine, sizes, on_progress=lambda done, total: progress.update(task, completed=done, total=total)
            )
        write_file(out, found.model_dump_json(indent=1) + "\n")
    best = ", ".join(f"{head.layer}.{head.head} ({head.score:.2f})" for head in found.heads[:5])
    print(f"{out}: {len(found.heads)} heads of {found.model_name}, {found.samples} needles recalled; best: {best}")
