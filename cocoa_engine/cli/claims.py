"""``cocoa claims``: how well the risk of claims and sentences points at labelled errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cocoa_engine.cli.dataset_options import Cache, Chat, DataPath, Draws, Format, Prompts, Seed, read, teacher_forced
from cocoa_engine.cli.export import check_writable, write
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Calibrator, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import output
from cocoa_engine.cli.unfinished import measured_answers
from cocoa_engine.config import CocoaConfig

if TYPE_CHECKING:
    from cocoa_engine.lab.forced import TeacherForced


@with_options("gamma", "max_candidates")
def claims(
    context: typer.Context,
    config: CocoaConfig,
    loading: LoadOptions,
    data: DataPath,
    format: Format = None,
    prompts: Prompts = None,
    chat: Chat = False,
    draws: Draws = 1000,
    seed: Seed = 0,
    cache: Cache = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also write the table as CSV.")
    ] = None,
    model: Model = None,
    calibrator: Calibrator = None,
    no_color: NoColor = False,
) -> None:
    """Measure on labelled answers how well claims and sentences point at errors, beside spans and random claims."""
    records = read(data, format, prompts, seed)
    check_writable(data, out=out)
    with measured_answers(context, cache) as kept:
        progress = Progress("claims")
        engine = load_engine(model, loading, calibrator, progress=progress)
        from cocoa_engine.lab.claims import TokenValues, measure_claims, to_csv, to_markdown
        from cocoa_engine.lab.measured import span_risks

        applying = engine.calibrator_for(config)
        fitted = applying if applying is not None and applying.span is not None and applying.probe is None else None

        def values_of(forced: TeacherForced) -> TokenValues:
            # after a prompt of one token there is no source
            if fitted is None or (fitted.heads and not forced.profile.source_attention):
                return TokenValues.of(forced)
            return TokenValues.of(forced, span_risks(forced, fitted, config, engine.num_layers))

        progress.plan({"feeding answers": len(records), "computing": 0.05 * len(records)})
        with teacher_forced(engine, records, config, chat=chat, cache=kept, progress=progress) as answers:
            values = list(map(values_of, answers))
        with progress.stage("computing"):
            rows = measure_claims(values, draws=draws, seed=seed)
        if out is not None:
            write(out, to_csv(rows))
        console, text = output(no_color), to_markdown(rows)
        if console.is_terminal:
            from rich.markdown import Markdown  # of this command alone, and slow to import

            console.print(Markdown(text))
        else:
            console.print(text, soft_wrap=True)
