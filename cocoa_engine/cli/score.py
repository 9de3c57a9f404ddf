"""cocoa score: the scores of given texts after a prompt. Nothing is generated."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from cocoa_engine.arguments import ResultModel
from cocoa_engine.cli.ask import answer_json
from cocoa_engine.cli.info import declared_options, load_engine
from cocoa_engine.cli.options import (
    OTHER_METHODS,
    Calibrator,
    Json,
    LoadOptions,
    Model,
    NoColor,
    Runner,
    Sources,
    file_option,
    read_source,
    with_options,
)
from cocoa_engine.cli.output import (
    Html,
    Progress,
    check_writable,
    on_interrupt,
    output,
    plain_table,
    print_json,
    print_note,
    write,
)
from cocoa_engine.config import CocoaConfig
from cocoa_engine.equations import rule_without_rivals
from cocoa_engine.errors import CocoaError, ConfigError, DataError, OutputError, need
from cocoa_engine.files import draft_of, is_stream
from cocoa_engine.lab.files import read_parquet, read_text
from cocoa_engine.methods import METHODS
from cocoa_engine.rendering.documents import render
from cocoa_engine.rendering.highlights import visible
from cocoa_engine.rendering.terminal import check_list
from cocoa_engine.rendering.wording import SOURCES, verdict
from cocoa_engine.report import finite
from cocoa_engine.results import Generation

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


def score_rows(
    engine: "CocoaEngine", rows: Path, out: Path, config: CocoaConfig, *, progress: Progress | None = None
) -> tuple[int, int]:
    """Score the rows of a file, and write them with their risk. The file is replaced when all rows are scored.

    A row is an object with ``prompt`` and ``text``; ``source``, if given, is a part of the prompt. What else it has is
    kept, with null for NaN and infinite numbers. ``risk`` is added, or ``error`` if the row cannot be scored; those of
    an earlier run are left out. Returns the numbers of errors and of rows.
    """
    lines, failed = read_rows(rows), 0
    with writing(out) as write, (progress or Progress("score")).stage("scoring", "rows", len(lines)) as stage:
        for number, line in enumerate(lines, start=1):
            scored, has_error = scored_row(engine, number, line, config)
            failed += has_error
            write(scored)
            stage.advance()
    return failed, len(lines)


def read_rows(file: Path) -> list[str]:
    """The rows of a file, each as JSON. Empty lines are left out; a line need not be JSON."""
    if _is_parquet(file):
        lines = [json.dumps(dict(row), ensure_ascii=False, default=str) for _, row in read_parquet(file)]
    else:
        # str.splitlines would also split at characters that may occur inside a JSON string
        lines = [line for line in read_text(file).split("\n") if line.strip()]
    if not lines:
        raise DataError(f"{file} has no rows.")
    return lines


class Row(ResultModel):
    """A row to score: what it has to have."""

    prompt: str
    text: str
    source: str | None = None


def scored_row(engine: "CocoaEngine", number: int, line: str, config: CocoaConfig) -> tuple[str, bool]:
    """A row with its risk or its error as a JSON line, and whether it has an error."""

    def as_line(row: dict[str, Any]) -> str:  # a lone surrogate, which a file cannot hold, stays escaped
        return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()

    values: dict[str, Any] = {}
    try:
        # Parquet has NaN, JSON has not
        parsed = json.loads(line, parse_constant=lambda _: None, parse_float=lambda number: finite(float(number)))
        if not isinstance(parsed, dict):
            raise DataError("it is not a JSON object")
        values = {name: value for name, value in parsed.items() if name not in ("risk", "error")}  # of an earlier run
        row = Row.model_validate(parsed)
        source = None if row.source is None else [row.source]
        divides = not METHODS[config.method].needs_own_passes  # dola, decore and diver score a text as one span
        scored = engine.score(row.prompt, row.text, config=config, divide=divides, source=source)
        return as_line({**values, "risk": risk_of_row(scored)}), False
    except (CocoaError, ValueError, RecursionError) as error:
        message = f"row {number}: {error}"
    try:
        return as_line({**values, "error": message}), True
    except RecursionError:  # its other values are nested too deeply to be written
        return as_line({"error": message}), True


@contextmanager
def writing(out: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a row, given as JSON. At the end the rows become the file.

    After an error or an interruption, the file is as it was, and the JSON lines so far are in ``NAME.incomplete``. A
    pipe gets each row at once.
    """
    streams, parquet = is_stream(out), _is_parquet(out)
    if parquet:
        if streams:
            raise ConfigError(f"{out} is a pipe or a device, to which Parquet cannot be written; name a .jsonl file")
        need("pyarrow.parquet", extra="eval", what="writing parquet files")
    rest = out if streams else Path(os.path.realpath(out)).with_name(f"{out.name}.incomplete")
    with draft_of(rest if parquet else out) as draft:
        rows = 0

        def write(line: str) -> None:
            nonlocal rows
            draft.write(f"{line}\n".encode())
            draft.flush()
            rows += 1

        try:
            with on_interrupt(lambda: f"{rows} rows are kept in {rest}" if rows else "no row was scored"):
                yield write
            if parquet:
                draft.seek(0)
                _write_parquet([json.loads(line) for line in draft], out, rest)
        except BaseException:
            if rows and not streams:
                draft.close()
                os.replace(draft.name, rest)
            raise
    if parquet:
        rest.unlink()


def _write_parquet(rows: Sequence[dict[str, Any]], out: Path, rest: Path) -> None:
    import pyarrow.parquet

    columns = dict.fromkeys(name for row in rows for name in row)
    with draft_of(out) as draft:
        try:
            table = pyarrow.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows])
            pyarrow.parquet.write_table(table, draft)
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # such as texts and numbers in one column
            raise OutputError(f"{out} cannot be written ({error}); the rows are kept as JSON lines in {rest}") from None


def risk_of_row(generation: Generation) -> dict[str, Any]:
    """The output of one answer as plain values. A number that is not finite is `None`.

    The attention is the mean over the spans with visible text.
    """
    shown = [span for span in generation.spans if span.text.strip()]
    attention = [span.source_attention for span in shown if span.source_attention is not None]
    passages = [mean(span.passage_attention) for span in shown if span.passage_attention]
    copied = ("answer_risk", "answer_threshold", "max_risk", "threshold", "risk_source", "out_of_domain")
    risk = {
        "verdict": verdict(generation),
        **{name: getattr(generation, name) for name in copied},
        "source_attention": mean(attention) if attention else None,
        "passage_attention": mean(passages) if passages else None,
        "check": [check.model_dump() for check in generation.check_these()],
        "sentences": [sentence.model_dump(include={"start", "end", "risk"}) for sentence in generation.sentences],
    }
    return json.loads(json.dumps(risk), parse_constant=lambda _: None)


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


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
        file_option(
            "Answers from elsewhere: Parquet, or a JSON object a line, with prompt and text, and optionally the "
            "source, a part of the prompt. Needs --out."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        file_option(
            "Where the rows of --rows are written with their risk, as Parquet if the file is named so; a row that "
            "cannot be scored gets an error."
        ),
    ] = None,
    runner: Runner = None,
) -> None:
    """Score a text after a prompt: its log-probability, its layer disagreement and the method's score.

    For the verdict and the claims to check, and with --html, --json or --rows, each text is divided at its risk points,
    as an answer would be, so that its claims and sentences have a risk of their own. Methods such as dola, which read a
    text several times, score it as one span.
    """
    texts = text or []
    if (rows is None) != (out is None):
        raise ConfigError("--rows and --out go together: the rows to score, and the file for their risk")
    if rows is not None and (prompt is not None or texts or source or html is not None or json):
        raise ConfigError("--rows has the prompts and texts: leave --prompt, --text, --source, --html and --json out")
    if rows is None and (prompt is None or not texts):
        raise ConfigError("give --prompt and --text, or --rows and --out")
    sources = [read_source(file) for file in source or ()]
    if runner is not None and (out is None or is_stream(out)):
        raise ConfigError(
            "sharing the work is for many rows: give --rows and --out"
            if out is None
            else f"finished rows are kept beside the file of --out: name a regular file, not {out}"
        )
    check_writable(rows, html=html, out=out)
    progress = Progress("score")
    if rows is not None and out is not None:
        replaces = out.is_file() and not is_stream(out)
        if runner is not None:
            load = declared_options(model, loading, calibrator)
            failed, total = runner(load, rows, out, config, progress=progress, threads=loading.threads)
        else:
            engine = load_engine(model, loading, calibrator, progress=progress)
            failed, total = score_rows(engine, rows, out, config, progress=progress)
        if replaces:  # an interrupted run leaves the file as it was
            print_note(f"{out} is replaced")
        print_note(f"{total} rows written to {out}" + (f", {failed} of them with an error" if failed else ""))
        if failed == total:
            raise typer.Exit(1)
        return
    assert prompt is not None
    engine = load_engine(model, loading, calibrator, progress=progress)
    before = "\n\n".join([*sources, prompt])
    options: dict[str, Any] = {"config": config, "source": sources or None}
    several, divided = len(texts) > 1, list[Generation]()
    with progress.stage("scoring"):
        if not METHODS[config.method].needs_own_passes and (html is not None or json or not several):
            divided = engine.score(before, texts, divide=True, **options)
        generations = engine.score(before, texts, **options) if several else [engine.score(before, texts[0], **options)]
    if html is not None:
        write(html, render(divided or generations, "html", title=prompt))
    if json:
        answers = [answer_json(whole, parts) for whole, parts in zip_longest(generations, divided)]
        print_json(f"[{','.join(answers)}]" if several else answers[0])
    elif several:
        output(no_color).print(_rows(generations))
    else:
        parts: list[Text | Table] = [_statistics(generations[0])]
        for answer in divided:
            parts = [Text(answer.verdict), check_list(answer.check_these(), answer.risk_source), Text(), *parts]
        output(no_color).print(Group(*parts))


def _statistics(generation: Generation) -> Table:
    (span,), config = generation.spans, generation.config
    rule = rule_without_rivals(config.span_log_prob)
    rows: list[tuple[str, float | None, str]] = [
        ("log p", span.log_prob, f"{rule} over {len(span.token_ids)} tokens, in nats"),
        ("self-information", span.self_information, "-log p"),
        ("ConMLDS", span.con_mlds, "disagreement of consecutive middle layers"),
        ("fMLDS", span.f_mlds, "disagreement of the middle layers with the final one"),
        ("risk", span.risk, SOURCES.get(str(span.risk_source), "")),
        ("answer's risk", generation.answer_risk, "calibrated, of the text as a whole"),
        ("score", span.score, f"{config.method}, by {config.metric}, alpha {config.alpha:g}"),
    ]
    name, number = Column(style="bold", no_wrap=True), Column(justify="right", no_wrap=True)
    table = plain_table(name, number, Column(style="dim"))
    for title, value, meaning in rows:
        if value is not None:
            table.add_row(title, f"{value:.4f}", meaning)
    return table


def _rows(generations: Sequence[Generation]) -> Table:
    headings = ("risk", "tokens", "log p", "ConMLDS", "fMLDS", "score")
    numbers = [Column(name, justify="right") for name in headings]
    table = plain_table(Column("text", min_width=8), *numbers)
    for generation in generations:
        (span,) = generation.spans
        values = (span.log_prob, span.con_mlds, span.f_mlds, span.score)
        risk = "-" if span.risk is None else f"{span.risk:.4f}"
        table.add_row(Text(visible(span.text)), risk, str(len(span.token_ids)), *(f"{value:.4f}" for value in values))
    return table
