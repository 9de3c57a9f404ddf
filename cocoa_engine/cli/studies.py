"""The commands that measure the method on data: signal, alpha and heads."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markdown import Markdown
from rich.text import Text

from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.measured import (
    Cache,
    Chat,
    DataPath,
    Draws,
    Format,
    Prompts,
    Seed,
    fate,
    measured_answers,
    read,
    teacher_forced,
)
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, file_option, with_options
from cocoa_engine.cli.output import Overwrite, check_drawable, check_writable, output, print_json, reserved
from cocoa_engine.cli.progress import Progress
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError, DataError
from cocoa_engine.lab.data import detect_format, read_labelled, sample
from cocoa_engine.optional import need
from cocoa_engine.output_files import write_file
from cocoa_engine.safe_text import short_repr


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
    from cocoa_engine.lab.signal_report import draw, measure, plot_names, to_markdown

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
            drawn = draw(record, items, config, out)
        console = output(no_color)
        console.print(Markdown(text) if console.is_terminal else text, soft_wrap=not console.is_terminal)
        console.print(f"Written to {out}: signal.json, signal.md, {', '.join(file.name for file in drawn)}")


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
    plot: Annotated[Path | None, file_option("Write the scatter plot to FILE.")] = None,
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
    files = [plot] if plot else []
    with reserved(*files, overwrite=overwrite), measured_answers(context, cache) as kept:
        progress = Progress("alpha")
        engine = load_engine(model, loading, progress=progress)
        from cocoa_engine.lab.alpha import collect, draw, suggest
        from cocoa_engine.lab.cache import AnswerCache

        asked: Sequence[str | Sequence[int]] = [
            engine.encode_chat([{"role": "user", "content": question.question}]) if chat else question.prompt
            for question in questions
        ]
        known = None if kept is None else AnswerCache(kept, "alpha", engine, config)
        with progress.stage("answering", "prompts", len(asked), fate=partial(fate, kept)) as stage:
            candidates = collect(engine, asked, config, cache=known, advance=stage.advance)
        ratios = suggest(candidates)
        if plot:
            draw(candidates, ratios, config.metric, plot)
        if json:
            record = {"prompts": len(asked), "metric": config.metric, **ratios._asdict(), "spans": candidates}
            print_json(dumps(record))
            return
        text = (
            f"|log p_S| / MLDS of {ratios.candidates} candidate spans ({config.metric}, {len(asked)} prompts): "
            f"median {ratios.median:.2f}, middle half {ratios.low:.2f} to {ratios.high:.2f}; "
            f"ratio of the means {ratios.of_means:.2f}. The paper takes alpha near this ratio, and recommends 1 to 3."
        )
        output(no_color).print(Text(text))


MAX_LENGTH, MAX_LENGTHS = 10**7, 100  # tokens, and how many lengths there may be


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
        str, typer.Option(help="Lengths of the texts that needles are hidden in, in tokens.")
    ] = "256,512,1024",
    spread: Annotated[
        bool,
        typer.Option(
            "--spread",
            help="Search for no heads: take 20 heads spread over the layers after the middle, for models that recall "
            "no needle.",
        ),
    ] = False,
    prompts: Annotated[
        int, typer.Option(min=0, max=10**5, help="Prompts to answer for the reference distribution; 0: none.")
    ] = 60,
    cache: Cache = None,
    overwrite: Overwrite = False,
) -> None:
    """Find a model's retrieval heads, and how much they attend to a source. No labels are needed.

    Every engine of this model finds them in the cache directory from now on: its spans have a source attention, and
    --method decore masks these heads.
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
    with reserved(*([] if out is None else [out]), overwrite=overwrite), measured_answers(context, cache) as kept:
        progress = Progress("heads")
        engine = load_engine(model, loading, progress=progress)
        from cocoa_engine.lab.heads import RUNS, find_retrieval_heads, with_reference  # imports torch
        from cocoa_engine.methods.retrieval_heads import keep, spread_heads_of

        needles = 0 if spread else len(sizes) * RUNS
        progress.plan({"needles": needles, "answering": prompts})
        if spread:
            if (over_layers := spread_heads_of(engine.session.model)) is None:
                raise ConfigError("this model has no layer that attends to the whole prompt")
            found = over_layers.model_copy(update={"model_name": engine.model_name})
            how = f"spread over layers {found.heads[0].layer} and above"
        else:
            with progress.stage("needles", "needles", needles, fate=partial(fate, kept)) as stage:
                found = find_retrieval_heads(engine, sizes, on_progress=stage.at, cache=kept)
            best = ", ".join(f"{head.layer}.{head.head} ({head.score:.2f})" for head in found.heads[:5])
            how = f"{found.samples} needles recalled; best: {best}"
        if prompts:
            with progress.stage("answering", "prompts", prompts, fate=partial(fate, kept)) as stage:
                found = with_reference(engine, found, prompts=prompts, on_progress=stage.at, cache=kept)
        lines = [f"{len(found.heads)} heads of {found.model_name}, {how}"]
        if found.reference is not None:
            low, middle, high = (found.reference[len(found.reference) * part // 20] for part in (1, 10, 19))
            lines.append(
                f"source attention of {found.reference_spans} own spans: 5 % below {low:.3f}, half below "
                f"{middle:.3f}, 95 % below {high:.3f}"
            )
        if out is not None:
            write_file(out, found.model_dump_json(indent=1) + "\n")
            lines.append(f"Written to {out}.")
        show = partial(output(no_color=True).print, sep="\n", soft_wrap=True)
        show(*lines)
        try:
            file = keep(found, engine.session.model)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"the heads cannot be kept in the cache directory ({error}). Set COCOA_CACHE_DIR to a folder that can "
                "be written to, or give --out FILE and pass it as --decore-heads."
            ) from None
    show(f"Written to {file}. Engines of this model use it from now on.")
