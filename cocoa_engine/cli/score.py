"""``cocoa score``: the figures of a given text after a given prompt. Nothing is generated."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.terminal import output, print_json
from cocoa_engine.config import CocoaConfig


@with_options("method", "metric", "alpha", "span_log_prob", "middle_layers", "final_layer")
def score(
    config: CocoaConfig,
    loading: LoadOptions,
    prompt: Annotated[str, typer.Option(help="What precedes the text, as it stands: no chat template is applied.")],
    text: Annotated[str, typer.Option(help="The text to score.")],
    model: Model = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Score a text: its log-probability after a prompt, its layer disagreement and the method's score."""
    generation = load_engine(model, loading).score(prompt, text, config=config)
    if json:
        print_json(generation.model_dump_json())
        return
    span = generation.spans[0]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("log p", f"{span.log_prob:.4f}", f"{config.span_log_prob} over {len(span.token_ids)} tokens, in nats")
    table.add_row("self-information", f"{span.self_information:.4f}", "-log p")
    table.add_row("ConMLDS", f"{span.con_mlds:.4f}", "disagreement of consecutive middle layers")
    table.add_row("fMLDS", f"{span.f_mlds:.4f}", "disagreement of the middle layers with the final one")
    table.add_row("score", f"{span.score:.4f}", f"{config.method}, by {config.metric}, alpha {config.alpha:g}")
    output(no_color).print(table)
