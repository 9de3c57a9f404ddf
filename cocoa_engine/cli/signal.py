"""``cocoa signal``: does layer disagreement separate hallucinated from supported answers, on a model and data?"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.markdown import Markdown

from cocoa_engine.cli.dataset_options import (
    Cache,
    Chat,
    DataPath,
    Draws,
    Format,
    Prompts,
    Seed,
    command_line,
    read,
    teacher_forced,
)
from cocoa_engine.cli.export import Overwrite, reserved
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import output
from cocoa_engine.cli.unfinished import measured_answers
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import DataError
from cocoa_engine.lab.data import detect_format
from cocoa_engine.optional import need
from cocoa_engine.output_files import write_file


@with_options("alpha", "gamma", "max_candidates", "span_log_prob", "middle_layers", "final_layer")
def signal(
    context: typer.Context,
    config: CocoaConfig,
    loading: LoadOptions,
    data: DataPath,
    out: Annotated[Path, typer.Option(help="Folder for signal.json, signal.md and plots.", file_okay=False)],
    format: Format = None,
    prompts: Prompts = None,
    chat: Chat = False,
    context_lift: Annotated[
        bool,
        typer.Option(
            "--context-lift", help="Also feed each answer without its source, and measure the effect of the source."
        ),
    ] = False,
    draws: Draws = 1000,
    seed: Seed = 0,
    cache: Cache = None,
    overwrite: Overwrite = False,
    model: Model = None,
    no_color: NoColor = False,
) -> None:
    """Measure on labelled answers whether layer disagreement separates hallucinated from supported ones.

    Every score is compared with baselines that need no hidden states: log-probability, entropy, margin and position.
    """
    need("scipy", extra="risk", what="cocoa signal")
    need("matplotlib", extra="risk", what="cocoa signal")
    records = read(data, format, prompts, seed)
    if context_lift and (lacking := next((record for record in records if not record.source), None)):
        raise DataError(f"{lacking.id!r} has no source, so its context lift cannot be measured.")
    from cocoa_engine.lab.indicators import Layers, Level, collect
    from cocoa_engine.lab.signal_report import About, draw, measure, plot_names, to_markdown

    plots = [name for level in get_args(Level) for name in plot_names(level)]
    files = [out / name for name in ("signal.json", "signal.md", *plots)]
    with reserved(*files, overwrite=overwrite), measured_answers(context, cache) as kept:
        progress = Progress("signal")
        engine = load_engine(model, loading, progress=progress)
        Layers.of(config, engine.num_layers)  # refuse bad settings before the work
        progress.plan({"feeding answers": len(records), "computing": 0.1 * len(records)})
        with teacher_forced(
            engine, records, config, chat=chat, without_source=context_lift, cache=kept, progress=progress
        ) as answers:
            items = collect(answers)
        about: About = {
            "data": data.name,
            "format": format or detect_format(data),
            "model": engine.model_name,
            "answers": len(records),
            "prompts": len({record.group for record in records}),
            "chat": chat,
            "command": command_line(),
        }
        with progress.stage("computing"):
            record = measure(about, items, config, draws=draws, seed=seed)
            write_file(out / "signal.json", dumps(record, indent=1, ensure_ascii=False) + "\n")
            text = to_markdown(record)
            write_file(out / "signal.md", text)
            drawn = draw(record, items, config, out)
        console = output(no_color)
        console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal)
        console.print(f"Written to {out}: signal.json, signal.md, {', '.join(file.name for file in drawn)}")
