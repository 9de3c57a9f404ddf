"""``cocoa score``: the scores of given texts after a prompt. Nothing is generated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.answer_json import answer_json, answers_json
from cocoa_engine.cli.export import Html, check_writable, write
from cocoa_engine.cli.loading import declared_options, load_engine
from cocoa_engine.cli.options import OTHER_METHODS, Calibrator, Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.plugins import Runner
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.prompting import Sources, read_sources, with_sources
from cocoa_engine.cli.score_rows import divides, score_rows
from cocoa_engine.cli.terminal import output, print_json, print_note
from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import rule_without_rivals
from cocoa_engine.errors import ConfigError
from cocoa_engine.output_files import is_stream
from cocoa_engine.rendering.documents import render
from cocoa_engine.rendering.terminal import check_list
from cocoa_engine.rendering.wording import SOURCES, visible
from cocoa_engine.results import Generation


@with_options("method", "metric", "alpha", "gamma", "span_log_prob", "middle_layers", "final_layer", *OTHER_METHODS)
def score(
    config: CocoaConfig,
    loading: LoadOptions,
    prompt: Annotated[
        str | None, typer.Option(help="The text before the text to score. No chat template is applied.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="The text to score. Repeatable; each text is one row.", show_default=False)
    ] = None,
    source: Sources = None,
    model: Model = None,
    calibrator: Calibrator = None,
    json: Json = False,
    no_color: NoColor = False,
    html: Html = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows",
            metavar="FILE",
            help="Answers from elsewhere: Parquet, or a JSON object a line, with prompt and text, and optionally the "
            "source, a part of the prompt. Needs --out.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Where the rows of --rows are written with their risk, as Parquet if the file is named so; a row that "
            "cannot be scored gets an error.",
        ),
    ] = None,
    runner: Runner = None,
) -> None:
    """Score a text after a prompt: its log-probability, its layer disagreement and the method's score.

    For the verdict and the claims to check, and with --html, --json or --rows, each text is divided at its risk points,
    as an answer would be, so that its claims and sentences have a risk of their own. Methods such as dola, which read a
    text several times, score it as one span.
    """
    given = text or []
    if (rows is None) != (out is None):
        raise ConfigError("--rows and --out go together: the rows to score, and the file for their risk")
    if rows is not None and (prompt is not None or given or source or html is not None or json):
        raise ConfigError("--rows has the prompts and texts: leave --prompt, --text, --source, --html and --json out")
    if rows is None and (prompt is None or not given):
        raise ConfigError("give --prompt and --text, or --rows and --out")
    sources = read_sources(source)
    if runner is not None and rows is None:
        raise ConfigError("sharing the work is for many rows: give --rows and --out")
    if runner is not None and out is not None and is_stream(out):
        raise ConfigError(f"finished rows are kept beside the file of --out: name a regular file, not {out}")
    check_writable(rows, html=html, out=out)
    progress = Progress("score")
    engine = None if runner is not None else load_engine(model, loading, calibrator, progress=progress)
    if rows is not None and out is not None:
        replaces = out.is_file() and not is_stream(out)
        if runner is not None:
            load = declared_options(model, loading, calibrator)
            failed, total = runner(load, rows, out, config, progress=progress, threads=loading.threads)
        else:
            assert engine is not None
            failed, total = score_rows(engine, rows, out, config, progress=progress)
        if replaces:  # an interrupted run leaves the file as it was
            print_note(f"{out} is replaced")
        print_note(f"{total} rows written to {out}" + (f", {failed} of them with an error" if failed else ""))
        if failed == total:
            raise typer.Exit(1)
        return
    assert prompt is not None
    assert engine is not None
    before = with_sources(sources, prompt)
    options: dict[str, Any] = {"config": config, "source": sources or None}
    several, divided = len(given) > 1, list[Generation]()
    with progress.stage("scoring"):
        if divides(config) and (html is not None or json or not several):
            divided = engine.score(before, given, divide=True, **options)
        generations = engine.score(before, given, **options) if several else [engine.score(before, given[0], **options)]
    if html is not None:
        write(html, render(divided or generations, "html", title=prompt))
    if json:
        shown = [answer_json(one, other) for one, other in zip_longest(generations, divided)]
        print_json(answers_json(shown) if several else shown[0])
    elif several:
        output(no_color).print(_rows(generations))
    else:
        parts: list[Text | Table] = [_statistics(generations[0])]
        if divided:
            parts = [
                Text(divided[0].verdict),
                check_list(divided[0].check_these(), divided[0].risk_source),
                Text(),
                *parts,
            ]
        output(no_color).print(Group(*parts))


def _statistics(generation: Generation) -> Table:
    """Every statistic of one text, with its meaning."""
    (span,), config = generation.spans, generation.config
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    rule = rule_without_rivals(config.span_log_prob)
    table.add_row("log p", f"{span.log_prob:.4f}", f"{rule} over {len(span.token_ids)} tokens, in nats")
    table.add_row("self-information", f"{span.self_information:.4f}", "-log p")
    table.add_row("ConMLDS", f"{span.con_mlds:.4f}", "disagreement of consecutive middle layers")
    table.add_row("fMLDS", f"{span.f_mlds:.4f}", "disagreement of the middle layers with the final one")
    if span.risk is not None and span.risk_source is not None:
        table.add_row("risk", f"{span.risk:.4f}", SOURCES[span.risk_source])
    if generation.answer_risk is not None:
        table.add_row("answer's risk", f"{generation.answer_risk:.4f}", "calibrated, of the text as a whole")
    table.add_row("score", f"{span.score:.4f}", f"{config.method}, by {config.metric}, alpha {config.alpha:g}")
    return table


def _rows(generations: Sequence[Generation]) -> Table:
    """One row per text."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("text", overflow="fold", min_width=8)
    for name in ("risk", "tokens", "log p", "ConMLDS", "fMLDS", "score"):
        table.add_column(name, justify="right", overflow="fold")
    for generation in generations:
        (span,) = generation.spans
        values = (span.log_prob, span.con_mlds, span.f_mlds, span.score)
        risk = "-" if span.risk is None else f"{span.risk:.4f}"
        table.add_row(Text(visible(span.text)), risk, str(len(span.token_ids)), *(f"{value:.4f}" for value in values))
    return table
