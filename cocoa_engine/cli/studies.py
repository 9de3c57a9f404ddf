"""The commands that measure the method on data: signal, heads and threshold."""

import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Group
from rich.markdown import Markdown
from rich.table import Column, Table
from rich.text import Text

from cocoa_engine.cli import measured
from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.options import (
    Calibrator,
    Json,
    LoadOptions,
    Model,
    NoColor,
    Raw,
    System,
    file_option,
    require_chat,
    with_options,
)
from cocoa_engine.cli.output import (
    Overwrite,
    Progress,
    output,
    plain_table,
    print_json,
    print_note,
    reserved,
)
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError, need, short_repr
from cocoa_engine.files import private_folder, write_file
from cocoa_engine.lab.data import detect_format
from cocoa_engine.memory import quiet_torchao
from cocoa_engine.rendering.wording import SOURCES, count

if TYPE_CHECKING:
    from cocoa_engine.lab.stopping import Row


@with_options("alpha", "gamma", "max_candidates", "span_log_prob", "middle_layers", "final_layer")
def signal(
    context: typer.Context,
    config: CocoaConfig,
    loading: LoadOptions,
    data: measured.DataPath,
    out: Annotated[Path, typer.Option(help="Folder for signal.json, signal.md and plots.", file_okay=False)],
    format: measured.Format = None,
    prompts: measured.Prompts = None,
    chat: measured.Chat = False,
    draws: measured.Draws = 1000,
    seed: measured.Seed = 0,
    cache: measured.Cache = None,
    overwrite: Overwrite = False,
    model: Model = None,
    no_color: NoColor = False,
) -> None:
    """Measure on labelled answers whether layer disagreement separates hallucinated from supported ones.

    Every score is compared with baselines that need no hidden states: log-probability, entropy, margin and position.
    """
    need("matplotlib", extra="risk", what="cocoa signal")
    records = measured.read(data, format, prompts, seed)
    from cocoa_engine.lab.indicators import Level, collect
    from cocoa_engine.lab.measured import Layers
    from cocoa_engine.lab.signal_report import draw, measure, plot_name, to_markdown

    files = [out / name for name in ("signal.json", "signal.md", *map(plot_name, get_args(Level)))]
    with reserved(*files, overwrite=overwrite), measured.measured_answers(context, cache) as folder:
        progress = Progress("signal")
        engine = load_engine(model, loading, progress=progress)
        Layers.of(config, engine.num_layers)  # refuse bad settings before the work
        progress.plan({"feeding answers": len(records), "computing": 0.1 * len(records)})
        with measured.teacher_forced(engine, records, config, chat=chat, cache=folder, progress=progress) as answers:
            items = collect(answers)
        about: dict[str, Any] = {
            "data": data.name,
            "format": format or detect_format(data),
            "model": engine.model_name,
            "answers": len(records),
            "prompts": len({record.group for record in records}),
            "chat": chat,
            "command": shlex.join(["cocoa", *sys.argv[1:]]),
        }
        with progress.stage("computing"):
            record = measure(about, items, config, draws=draws, seed=seed)
            write_file(out / "signal.json", dumps(record, indent=1, ensure_ascii=False) + "\n")
            text = to_markdown(record)
            write_file(out / "signal.md", text)
            drawn = draw(record, out)
        console = output(no_color)
        console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal)
        console.print(f"Written to {out}: signal.json, signal.md, {', '.join(file.name for file in drawn)}")


MAX_LENGTH, MAX_LENGTHS = 10**7, 100  # tokens, and how many lengths there may be

TOKENS = 150
"""The work of an answer, where that of reading a token of a text is 1."""


@with_options()
def heads(
    context: typer.Context,
    loading: LoadOptions,
    model: Model = None,
    out: Annotated[
        Path | None,
        file_option("A JSON file to write as well, for --decore-heads. Engines find theirs in the cache directory."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Least lengths of the texts that the model copies facts from, in tokens.")
    ] = "256,512,1024",
    spread: Annotated[
        bool,
        typer.Option(
            "--spread",
            help="Search for no heads: take 20 heads spread over the layers after the middle, for models that recall "
            "no fact.",
        ),
    ] = False,
    prompts: Annotated[
        int,
        typer.Option(
            min=0, max=10**5, help="Prompts for the reference distribution, and half the number of questions; 0: none."
        ),
    ] = 60,
    cache: measured.Cache = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure a model: its retrieval heads, how much they attend to a source, and how sure it is of right answers.

    Every engine of this model finds the result in the cache directory from now on: its spans have a source attention,
    its answers are ranked among its own right ones, and --method decore masks these heads. No labels are needed.
    """
    try:
        sizes = [int(length) for length in lengths.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1 or max(sizes) > MAX_LENGTH or len(sizes) > MAX_LENGTHS:
        raise ConfigError(
            f"--lengths takes up to {MAX_LENGTHS} whole numbers from 1 to {MAX_LENGTH}, such as 256,512 (got "
            f"{short_repr(lengths)})"
        )
    files = [] if out is None else [out]
    with reserved(*files, overwrite=overwrite), measured.measured_answers(context, cache) as folder:
        progress = Progress("heads")
        engine = load_engine(model, loading, progress=progress)
        from cocoa_engine.lab.heads import (  # imports torch
            ROUNDS,
            SHORT,
            find_retrieval_heads,
            with_reference,
            with_right_answers,
        )
        from cocoa_engine.methods.retrieval_heads import keep, kept_file, spread_heads_of

        note = None
        try:  # before the work
            tempfile.TemporaryFile(dir=private_folder(kept_file(engine.session.model).parent)).close()
        except (OSError, RuntimeError) as error:
            note = _not_kept(error, out)
        tokens = 0 if spread else ROUNDS * sum(sizes)
        progress.plan({"reading texts": tokens, "answering": TOKENS * prompts, "asking": TOKENS * prompts})
        if spread:
            if (over_layers := spread_heads_of(engine.session.model)) is None:
                raise ConfigError("this model has no layer that attends to the whole prompt")
            heads = over_layers.model_copy(update={"model_name": engine.model_name})
            how = f"spread over layers {heads.heads[0].layer} and above"
        else:
            with progress.stage("reading texts", "tokens", tokens, fate=partial(measured.fate, folder)) as stage:
                heads = find_retrieval_heads(engine, sizes, advance=stage.advance, cache=folder)
            best = ", ".join(f"{head.layer}.{head.head} ({head.score:.2f})" for head in heads.heads[:5])
            how = f"{heads.samples} facts recalled; best: {best}"
        if prompts:
            with progress.stage("answering", "prompts", prompts, fate=partial(measured.fate, folder)) as stage:
                heads = with_reference(engine, heads, prompts=prompts, advance=stage.advance, cache=folder)
            asked = min(2 * prompts, len(SHORT))
            with progress.stage("asking", "questions", asked, fate=partial(measured.fate, folder)) as stage:
                heads = with_right_answers(engine, heads, questions=asked, advance=stage.advance, cache=folder)
        lines = [f"{len(heads.heads)} heads of {heads.model_name}, {how}"]
        if heads.reference is not None:
            low, middle, high = (heads.reference[len(heads.reference) * part // 20] for part in (1, 10, 19))
            lines.append(
                f"source attention of {heads.reference_spans} own spans: 5 % below {low:.3f}, half below "
                f"{middle:.3f}, 95 % below {high:.3f}"
            )
        if (own := heads.right_answers) is not None:
            middle, high = (own.surprisals[len(own.surprisals) * part // 10] for part in (5, 9))
            lines.append(f"surprisal of own right answers: half below {middle:.2f}, 90 % below {high:.2f} nats")
        elif prompts:
            lines.append("too few right answers: answers of this model are ranked among those of other models")
        if out is not None:
            write_file(out, heads.model_dump_json(indent=1) + "\n")
            lines.append(f"Written to {out}.")
        show = partial(output(no_color=True).print, sep="\n", soft_wrap=True)
        show(*lines)
        if note is None:
            try:
                file = keep(heads, engine.session.model)
            except (OSError, RuntimeError) as error:
                note = _not_kept(error, out)
            else:
                show(f"Written to {file}. Engines of this model use it from now on.")
        if note is not None:
            print_note(note)


def _not_kept(error: Exception, out: Path | None) -> str:
    """A note that the heads are in ``out`` alone; a ConfigError without it."""
    obstacle = f"the heads cannot be kept in the cache directory ({error})"
    if out is None:
        raise ConfigError(
            f"{obstacle}. Set COCOA_CACHE_DIR to a folder that can be written to, or give --out FILE and pass it as "
            "--decore-heads."
        ) from None
    return f"{obstacle}. Pass the file as --decore-heads."


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
    cache: measured.Cache = None,
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
    with measured.measured_answers(context, cache) as folder:
        interrupt: KeyboardInterrupt | None = None
        if asked := [line for line in lines if line.measured is None]:
            require_scale(config.risk, thresholds)
            progress = Progress("threshold")
            engine = load_engine(model, loading, calibrator, progress=progress)
            answer_cache = None if folder is None else AnswerCache(folder, "thresholds", engine, config)
            try:
                with progress.stage("answering", "prompts", len(asked)) as stage:
                    options: dict[str, Any] = {"system": system, "raw": raw, "advance": stage.advance}
                    answers.extend(measure(engine, asked, config, cache=answer_cache, **options))
            except KeyboardInterrupt as error:
                shown = "the output is of these" if answers else "there is no output"
                fate = f"; {measured.fate(folder)}" if folder is not None and folder.answers() else ""
                print_note(f"answering: {len(answers)} of {len(lines)} were done; {shown}{fate}")
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
                parts.append(Text(f"{wrong} of {labelled} answers that can be judged are wrong."))
            output(no_color).print(Group(*parts))
        if interrupt is not None:
            raise interrupt


def _table(title: str, default: "Row | None", rows: "Sequence[Row]", *, labelled: bool) -> Table:
    columns = {"answers stopped": "answers"}
    if any(row.spans is not None for row in rows):
        columns["spans stopped"] = "spans"
    if labelled:
        columns |= {"right stopped": "right_stopped", "wrong passed": "wrong_passed"}
    table = plain_table(*(Column(name, justify="right") for name in ("threshold", *columns)), title=title)
    table.padding = (0, 1, 0, 0)
    for row in rows if default is None else (default, *rows):
        number = "" if row.threshold is None else f"{row.threshold:.4f}"
        name = f"default {number}".strip() if row is default else number
        table.add_row(name, *(str(getattr(row, field)) for field in columns.values()))
    return table
