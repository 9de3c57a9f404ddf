"""``cocoa claims``: how well the risk of claims and sentences points at labelled errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from cocoa_engine.cli.dataset_options import Chat, DataPath, Draws, Format, Prompts, Seed, read, teacher_forced
from cocoa_engine.cli.export import check_writable, write
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.terminal import output
from cocoa_engine.config import CocoaConfig


@with_options("gamma", "max_candidates")
def claims(
    config: CocoaConfig,
    loading: LoadOptions,
    data: DataPath,
    format: Format = None,
    prompts: Prompts = None,
    chat: Chat = False,
    draws: Draws = 1000,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also write the table as CSV.")
    ] = None,
    model: Model = None,
    no_color: NoColor = False,
) -> None:
    """Measure on labelled answers how well claims and sentences point at errors, beside spans and random claims."""
    records = read(data, format, prompts, seed)
    check_writable(data, out=out)
    engine = load_engine(model, loading)
    from cocoa_engine.studies.claims import TokenValues, measure_claims, to_csv, to_markdown

    with teacher_forced(engine, records, config, chat=chat) as answers:
        rows = measure_claims(map(TokenValues.of, answers), draws=draws, seed=seed)
    if out is not None:
        write(out, to_csv(rows))
    console, text = output(no_color), to_markdown(rows)
    console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal)
