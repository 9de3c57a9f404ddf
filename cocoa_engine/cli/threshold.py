"""``cocoa threshold``: what a threshold on the risk would stop, on your own prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.measured import Cache, fate, measured_answers
from cocoa_engine.cli.options import Calibrator, Json, LoadOptions, Model, NoColor, file_option, with_options
from cocoa_engine.cli.output import output, plain_table, print_json, print_note
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.prompting import Raw, System, require_chat
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.optional import quiet_torchao
from cocoa_engine.rendering.wording import SOURCES, count

if TYPE_CHECKING:
    from cocoa_engine.lab.stopping import Row


@with_options(*(name for name in CocoaConfig.model_fields if name != "max_risk"))
def threshold(
    context: typer.Context,
    config: CocoaConfig,
    loading: LoadOptions,
    prompts: Annotated[
        Path,
        file_option(
            "JSON lines with a prompt or a question, and optionally its known answer; or with answers that were "
            "measured before, as cocoa ask --json prints them. Or a .txt file with one prompt a line."
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Thresholds, comma-separated. Default: suggested ones."),
    ] = None,
    model: Model = None,
    calibrator: Calibrator = None,
    system: System = None,
    raw: Raw = False,
    cache: Cache = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Show what a threshold on the risk would stop: the share of your answers and spans, right and wrong ones.

    The default is what a gate without a number compares with. After Ctrl-C, the tables are of the answers so far.
    """
    require_chat(system, raw=raw)
    try:
        thresholds = [float(part) for part in at.split(",")] if at is not None else []
    except ValueError:
        thresholds = [math.nan]
    if not all(map(math.isfinite, thresholds)):
        raise ConfigError(f"--at takes numbers, such as 0.3,0.5 (got {at!r})")
    with quiet_torchao():
        from cocoa_engine.lab.cache import AnswerCache
        from cocoa_engine.lab.stopping import (
            by_answer,
            by_default,
            by_span,
            common_source,
            measure,
            read_own_prompts,
            require_scale,
        )

    lines = read_own_prompts(prompts)
    answers = [line.measured for line in lines if line.measured is not None]
    common_source(answers, thresholds)  # refuse bad thresholds before the work
    with measured_answers(context, cache) as kept:
        interrupt: KeyboardInterrupt | None = None
        if asked := [line for line in lines if line.measured is None]:
            require_scale(config.risk, thresholds)
            progress = Progress("threshold")
            engine = load_engine(model, loading, calibrator, progress=progress)
            known = None if kept is None else AnswerCache(kept, "thresholds", engine, config)
            try:
                with progress.stage("answering", "prompts", len(asked)) as stage:
                    options: dict[str, Any] = {"system": system, "raw": raw, "cache": known, "advance": stage.advance}
                    answers.extend(measure(engine, asked, config, **options))
            except KeyboardInterrupt as error:
                shown = "the output is of these" if answers else "there is no output"
                kept_too = f"; {fate(kept)}" if kept is not None and kept.answers() else ""
                print_note(f"answering: {len(answers)} of {len(lines)} were done; {shown}{kept_too}")
                if not answers:
                    raise
                interrupt = error
        source, labelled = common_source(answers, thresholds), sum(answer.right is not None for answer in answers)
        default, default_of_whole = by_default(answers)
        rows, wholes = by_span(answers, thresholds), by_answer(answers, thresholds)
        if json:
            defaults = {"span": default and asdict(default), "answer": default_of_whole and asdict(default_of_whole)}
            record = {"answers": len(answers), "risk_source": source, "default": defaults}
            print_json(dumps({**record, "span": list(map(asdict, rows)), "answer": list(map(asdict, wholes))}))
        else:
            what = f" ({SOURCES[source]})" if source in SOURCES else ""
            title = f"Risk of spans, {count(len(answers), 'answer')}{what}"
            parts: list[Table | Text] = [_table(title, default, rows, labelled=bool(labelled))]
            if wholes:
                parts.append(_table("Risk of whole answers", default_of_whole, wholes, labelled=bool(labelled)))
            if default is not None:
                gate = "risk of whole answers" if default_of_whole is not None else "risk of spans"
                parts.append(Text(f"A gate without a number compares the {gate} with the default."))
            if not thresholds:
                parts.append(Text("The suggested thresholds stop at most 50 %, 25 %, 10 % and 5 % of the answers."))
            if labelled:
                wrong = sum(answer.right is False for answer in answers)
                parts.append(
                    Text(f"{wrong} of {labelled} answers with a known answer are wrong: they do not contain it.")
                )
            output(no_color).print(Group(*parts))
        if interrupt is not None:
            raise interrupt


def _table(title: str, default: Row | None, rows: Sequence[Row], *, labelled: bool) -> Table:
    columns = {"answers stopped": "answers"}
    if any(row.spans is not None for row in rows):
        columns["spans stopped"] = "spans"
    if labelled:
        columns |= {"right stopped": "right_stopped", "wrong passed": "wrong_passed"}
    table = plain_table(
        *(Column(name, justify="right", overflow="fold") for name in ("threshold", *columns)), title=title
    )
    table.padding = (0, 1, 0, 0)
    for row in rows if default is None else (default, *rows):
        number = "" if row.threshold is None else f"{row.threshold:.4f}"
        name = f"default {number}".strip() if row is default else number
        table.add_row(name, *(str(getattr(row, field)) for field in columns.values()))
    return table
