"""``cocoa heads``: find a model's retrieval heads, whose attention on the prompt is the source attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cocoa_engine.cli.dataset_options import Cache
from cocoa_engine.cli.export import Overwrite, reserved
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import LoadOptions, Model, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import output
from cocoa_engine.cli.unfinished import fate, measured_answers
from cocoa_engine.errors import ConfigError
from cocoa_engine.output_files import write_file
from cocoa_engine.safe_text import short_repr

if TYPE_CHECKING:
    from cocoa_engine.methods.retrieval_heads import RetrievalHeads

MAX_LENGTH, MAX_LENGTHS = 10**7, 100
"""Largest length of ``--lengths`` in tokens, and how many of them there may be."""


@with_options()
def heads(
    context: typer.Context,
    loading: LoadOptions,
    model: Model = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A JSON file to write as well, for --decore-heads. The file that engines find is in the cache "
            "directory.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Lengths of the texts that needles are hidden in, in tokens.")
    ] = "256,512,1024",
    spread: Annotated[
        bool,
        typer.Option(
            "--spread",
            help="Search for no heads: take 20 heads spread over the layers after the middle, for models that recall "
            "no needle.",
        ),
    ] = False,
    prompts: Annotated[
        int,
        typer.Option(
            min=0, max=100_000, help="Prompts that the model answers for the reference distribution; 0: none."
        ),
    ] = 60,
    cache: Cache = None,
    overwrite: Overwrite = False,
) -> None:
    """Find a model's retrieval heads, and how much they attend to a source. No labels are needed.

    Every engine of this model finds them in the cache directory from now on: its spans have a source attention, and
    --method decore masks these heads.
    """
    try:
        sizes = [int(length) for length in lengths.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > MAX_LENGTH or len(sizes) > MAX_LENGTHS:
        raise ConfigError(
            f"--lengths takes up to {MAX_LENGTHS} whole numbers from 1 to {MAX_LENGTH}, such as 256,512 (got "
            f"{short_repr(lengths)})"
        )
    with reserved(*([] if out is None else [out]), overwrite=overwrite), measured_answers(context, cache) as kept:
        progress = Progress("heads")
        engine = load_engine(model, loading, progress=progress)
        from cocoa_engine.lab.heads import RUNS, find_retrieval_heads, with_reference  # imports torch
        from cocoa_engine.methods.retrieval_heads import keep, spread_heads_of

        needles = 0 if spread else len(sizes) * RUNS
        progress.plan({"needles": needles, "answering": prompts})
        if spread:
            spread_over = spread_heads_of(engine.session.model)
            if spread_over is None:
                raise ConfigError("this model has no layer that attends to the whole prompt")
            found = spread_over.model_copy(update={"model_name": engine.model_name})
        else:
            with progress.stage("needles", "needles", needles, fate=partial(fate, kept)) as stage:
                found = find_retrieval_heads(engine, sizes, on_progress=stage.at, cache=kept)
        if prompts:
            with progress.stage("answering", "prompts", prompts, fate=partial(fate, kept)) as stage:
                found = with_reference(engine, found, prompts=prompts, on_progress=stage.at, cache=kept)
        if out is not None:
            write_file(out, found.model_dump_json(indent=1) + "\n")
        _show(found, spread=spread)
        if out is not None:
            _print(f"Written to {out}.")
        try:
            file = keep(found, engine.session.model)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"the heads cannot be kept in the cache directory ({error}). Set COCOA_CACHE_DIR to a folder that can "
                "be written to, or give --out FILE and pass it as --decore-heads."
            ) from None
    _print(f"Written to {file}. Engines of this model use it from now on.")


def _show(found: RetrievalHeads, *, spread: bool) -> None:
    if spread:
        _print(f"{len(found.heads)} heads of {found.model_name}, spread over layers {found.heads[0].layer} and above")
    else:
        best = ", ".join(f"{head.layer}.{head.head} ({head.score:.2f})" for head in found.heads[:5])
        _print(f"{len(found.heads)} heads of {found.model_name}, {found.samples} needles recalled; best: {best}")
    if found.reference is not None:
        low, middle, high = (found.reference[len(found.reference) * part // 20] for part in (1, 10, 19))
        _print(
            f"source attention of {found.reference_spans} own spans: 5 % below {low:.3f}, half below {middle:.3f}, "
            f"95 % below {high:.3f}"
        )


def _print(line: str) -> None:
    output(no_color=True).print(line, soft_wrap=True)
