"""``cocoa threshold``: what a threshold on the risk would stop, on your own prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.dataset_options import Cache, progress
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Calibrator, Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.prompting import Raw
from cocoa_engine.cli.terminal import output, print_json
from cocoa_engine.config import CocoaConfig
from cocoa_engine.datasets.own_prompts import read_own_prompts
from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import quiet_torchao
from cocoa_engine.rendering.wording import SOURCES

if TYPE_CHECKING:
    from cocoa_engine.studies.stopped_shares import Row


@with_options(*(name for name in CocoaConfig.model_fields if name != "max_risk"))
def threshold(
    config: CocoaConfig,
    loading: LoadOptions,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="JSON lines with a prompt or a question, and optionally its known answer; or with answers that were "
            "measured before, as cocoa ask --json prints them. Or a .txt file with one prompt a line.",
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS", help="Thresholds, comma-separated. Default: suggested ones.", show_default=False
        ),
    ] = None,
    model: Model = None,
    calibrator: Calibrator = None,
    raw: Raw = False,
    cache: Cache = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Show what a threshold on the risk would stop: the share of your answers and spans, right and wrong ones."""
    thresholds = _numbers(at)
    lines = read_own_prompts(prompts)
    with quiet_torchao():
        from cocoa_engine.studies.answering import answers_cache
        from cocoa_engine.studies.stopped_shares import (
            Answer,
            by_answer,
            by_span,
            common_source,
            measure,
            require_scale,
        )

    answers = [Answer.of(one.measured, one.is_right(one.measured.text)) for one in lines if one.measured is not None]
    common_source(answers, thresholds)  # refuse bad thresholds before the work
    if asked := [one for one in lines if one.measured is None]:
        require_scale(config.risk, thresholds)
        engine = load_engine(model, loading, calibrator)
        kept = None if cache is None else answers_cache(cache, "risks", engine, config)
        with progress("Answering", len(asked), kept=None if kept is None else kept.file) as advance:
            answers += measure(engine, asked, config, raw=raw, cache=kept, advance=advance)
    source = common_source(answers, thresholds)
    spans, wholes = by_span(answers, thresholds), by_answer(answers, thresholds)
    if json:
        rows = {"span": [row.record() for row in spans], "answer": [row.record() for row in wholes]}
        print_json(dumps({"answers": len(answers), "risk_source": source, **rows}))
        return
    labelled = sum(one.right is not None for one in answers)
    what = f" ({SOURCES[source]})" if source in SOURCES else ""
    title = f"Risk of spans{what}, {len(answers)} answers"
    parts: list[Table | Text] = [_table(title, spans, labelled=bool(labelled))]
    if wholes:
        parts.append(_table("Risk of whole answers", wholes, labelled=bool(labelled)))
    if not thresholds:
        parts.append(Text("These thresholds stop at most 50 %, 25 %, 10 % and 5 % of the answers, where one does."))
    if labelled:
        wrong = sum(one.right is False for one in answers)
        parts.append(Text(f"{wrong} of {labelled} answers with a known answer are wrong: they do not contain it."))
    output(no_color).print(Group(*parts))


def _numbers(given: str | None) -> list[float]:
    try:
        numbers = [float(part) for part in given.split(",")] if given is not None else []
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"--at takes numbers, such as 0.3,0.5 (got {given!r})")
    return numbers


def _table(title: str, rows: Sequence[Row], *, labelled: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 1, 0, 0))
    by_span = any(row.spans is not None for row in rows)
    headings = ["threshold", "answers stopped", *(["spans stopped"] if by_span else [])]
    for heading in [*headings, *(["right stopped", "wrong passed"] if labelled else [])]:
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        counts = [row.answers, *([row.spans] if by_span else [])]
        table.add_row(
            f"{row.threshold:.4f}",
            *map(str, [*counts, *([row.right_stopped, row.wrong_passed] if labelled else [])]),
        )
    return table
