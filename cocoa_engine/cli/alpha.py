"""``cocoa alpha``: the paper's heuristic for the weight of the penalty, on your model and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from cocoa_engine.cli.dataset_options import Cache, Chat, DataPath, Format, Seed
from cocoa_engine.cli.export import Overwrite, check_drawable, check_writable, reserved
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import output, print_json
from cocoa_engine.cli.unfinished import fate, measured_answers
from cocoa_engine.config import CocoaConfig
from cocoa_engine.lab.data import read_labelled, sample


@with_options("metric", "gamma", "max_candidates", "max_span_tokens", "span_boundary", "span_log_prob",
              "middle_layers", "final_layer", "max_new_tokens")  # fmt: skip
def alpha(
    context: typer.Context,
    config: CocoaConfig,
    loading: LoadOptions,
    data: DataPath,
    format: Format = None,
    prompts: Annotated[int, typer.Option(min=1, max=10**6, help="Number of prompts to answer, drawn at random.")] = 20,
    chat: Chat = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the scatter plot to FILE.")
    ] = None,
    seed: Seed = 0,
    cache: Cache = None,
    overwrite: Overwrite = False,
    model: Model = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Suggest alpha: answer prompts with alpha 1 and compare |log p| of every candidate span with its MLDS."""
    if plot:
        check_drawable("plot", plot)
        check_writable(plot=plot)
    records = sample(read_labelled(data, format, both_classes=False), prompts, seed)
    questions = {record.group: record for record in records}.values()
    with reserved(*([plot] if plot else []), overwrite=overwrite), measured_answers(context, cache) as kept:
        progress = Progress("alpha")
        engine = load_engine(model, loading, progress=progress)
        from cocoa_engine.lab.alpha import collect, draw, suggest
        from cocoa_engine.lab.cache import answers_cache

        asked: Sequence[str | Sequence[int]] = [
            engine.encode_chat([{"role": "user", "content": one.question}]) if chat else one.prompt for one in questions
        ]
        known = None if kept is None else answers_cache(kept, "alpha", engine, config)
        with progress.stage("answering", "prompts", len(asked), fate=partial(fate, kept)) as stage:
            candidates = collect(engine, asked, config, cache=known, advance=stage.advance)
        found = suggest(candidates)
        if plot:
            draw(candidates, found, config.metric, plot)
        if json:
            record = {"prompts": len(asked), "metric": config.metric, **found._asdict(), "spans": candidates}
            print_json(dumps(record))
            return
        text = (
            f"|log p_S| / MLDS of {found.candidates} candidate spans ({config.metric}, {len(asked)} prompts): "
            f"median {found.median:.2f}, middle half {found.low:.2f} to {found.high:.2f}; "
            f"ratio of the means {found.of_means:.2f}. The paper takes alpha near this ratio, and recommends 1 to 3."
        )
        output(no_color).print(Text(text))
