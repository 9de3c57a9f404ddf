"""Loading the model of a command, ``cocoa info``, and ``cocoa bench``: the time per token of your model here."""

import logging
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from cocoa_engine.cli.options import OTHER_METHODS, Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.output import Progress, output, plain_table, print_json, print_note
from cocoa_engine.config import CocoaConfig, Runtime
from cocoa_engine.errors import ConfigError, PromptError, safe
from cocoa_engine.model import load_options
from cocoa_engine.rendering.wording import count
from cocoa_engine.spans import Usage

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


def load_engine(
    model: str | None,
    options: LoadOptions,
    calibrator: Path | None = None,
    *,
    progress: Progress,
    **of_runtime: Any,
) -> "CocoaEngine":
    """Load a model. Only here are torch and transformers imported, so that ``--help`` and bad input are fast."""
    declared = declared_options(model, options, calibrator, **of_runtime)
    named = "the embedded model" if model is None else Path(model).name if Path(model).exists() else model
    with progress.stage(f"loading {named} (slower the first time)"):
        import torch
        from huggingface_hub import utils as hub
        from transformers.utils import logging as transformers_logging

        from cocoa_engine import CocoaEngine

        if options.threads:
            torch.set_num_threads(options.threads)
        if not options.debug:
            transformers_logging.set_verbosity_error()
            hub.logging.set_verbosity(logging.CRITICAL)  # hide retry messages; the final error is reported anyway
            transformers_logging.disable_progress_bar()  # there is one bar
            hub.disable_progress_bars()  # type: ignore[attr-defined]
        return CocoaEngine.from_pretrained(**load_options.loading_arguments(declared))


def declared_options(
    model: str | None, options: LoadOptions, calibrator: Path | None = None, **of_runtime: Any
) -> load_options.LoadOptions:
    """How a model is loaded, as the engine declares it. The arguments are those of :func:`load_engine`."""
    named = "auto" if calibrator is None else str(calibrator)
    return load_options.LoadOptions(
        model_name=model,
        tokenizer_name=options.tokenizer,
        model_kwargs={"revision": options.revision} if options.revision else {},
        dtype=options.dtype,
        device_map=options.device_map,
        runtime=Runtime(forward=options.forward, weights=options.weights, **of_runtime),
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
        calibrator=None if named == "none" else named,
    )


@with_options()
def info(loading: LoadOptions, model: Model = None, json: Json = False, no_color: NoColor = False) -> None:
    """Describe a model: its layers, its middle window, and how its branches run."""
    about = load_engine(model, loading, progress=Progress("info")).info()
    if json:
        print_json(about.model_dump_json())
        return
    table = plain_table(Column(style="bold", no_wrap=True), Column())
    for name, value in about.model_dump().items():
        match value:
            case None:
                shown = "none" if name == "native_obstacle" else "unknown"
            case bool():
                shown = "yes" if value else "no"
            case tuple() | list():
                shown = "..".join(map(str, value))
            case _:
                shown = f"{value:,}" if isinstance(value, int) else safe(str(value))
        table.add_row(name.replace("_", " "), Text(shown))
    output(no_color).print(table)


QUESTIONS = (
    "What is the capital of Australia, and when was it founded?",
    "Explain why the sky is blue.",
    "Write a Python function that reverses a list.",
    "Name five rivers in Europe and the countries they flow through.",
)
BASE = "HF generate, greedy"
PER_TOKEN = ("forward_passes", "risk_points")  # fields of Usage


@with_options(*OTHER_METHODS)
def bench(
    config: CocoaConfig,
    loading: LoadOptions,
    model: Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A question to answer. Default: four built-in ones. Repeatable.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="The decoding methods to measure, comma-separated.")
    ] = "greedy,cocoa-sig",
    tokens: Annotated[int, typer.Option(min=2, max=10**6, help="Maximum number of new tokens per answer.")] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="How often each question is answered with each method.")
    ] = 3,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Measure the time per token of decoding methods and of Hugging Face's greedy decoding, in turns.

    Questions are asked as a chat if the model has a chat template, otherwise the model continues them. After Ctrl-C,
    the table is of the finished rounds.
    """
    questions = list(prompt or QUESTIONS)
    if not all(question.strip() for question in questions):
        raise PromptError("a --prompt is empty")
    from cocoa_engine.lab.timing import describe, generate, measured_rounds, one_line, ratio, timed

    ours = [method.strip() for method in methods.split(",") if method.strip()]
    if not ours:
        raise ConfigError("--methods names no method")
    configs = {method: config.replace(method=method, max_new_tokens=tokens) for method in ours}
    progress = Progress("bench")
    # without its prefix cache, because Hugging Face's `generate` prefills the prompt every time
    engine = load_engine(model, loading, progress=progress, prefix_cache_mb=0)
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = list(map(engine.encode_chat, chats) if engine.has_chat_template else map(engine.encode, questions))
    usages: dict[str, list[Usage]] = {name: [] for name in configs}

    def hugging_face(ids: list[int]) -> int:
        return len(generate(engine.model, engine.tokenizer, [ids], tokens)[0])

    def answer(name: str, ids: list[int]) -> int:
        usages[name].append(engine.generate(ids, config=configs[name]).usage)
        return usages[name][-1].completion_tokens

    decoders = {BASE: timed(hugging_face)} | {name: timed(partial(answer, name)) for name in configs}
    turns = rounds * len(prompts) * len(decoders)
    progress.plan({"warming up": len(decoders), "measuring": turns})
    with progress.stage("warming up", "answers to warm up", len(decoders)) as stage:
        for decoder in decoders.values():  # the first pass compiles kernels and selects the backend
            decoder(prompts[0])
            stage.advance()
    for warm_up in usages.values():
        warm_up.clear()
    finished: list[dict[str, float]] = []
    interrupt: KeyboardInterrupt | None = None
    try:
        with progress.stage("measuring", "answers", turns) as stage:
            finished.extend(measured_rounds(decoders, [prompts] * rounds, stage.advance))
    except KeyboardInterrupt as error:
        if not finished:
            print_note("no round was finished")
            raise
        interrupt = error

    per_token = {name: [seconds[name] for seconds in finished] for name in decoders}
    of_decoders = {}
    for name, seconds in per_token.items():
        of_rounds = usages.get(name, [])[: len(finished) * len(prompts)]
        total = sum(usage.completion_tokens for usage in of_rounds)
        of_decoders[name] = {
            "ratio": ratio(seconds, per_token[BASE])._asdict(),
            "seconds_per_token": seconds,
            "per_kept_token": {
                field: sum(getattr(usage, field) for usage in of_rounds) / total for field in PER_TOKEN if total
            },
        }
    machine, info = describe(), engine.info()
    record: dict[str, Any] = {
        "model": info.model_name,
        "forward": info.forward,
        "linears": info.linears,
        "tokens": tokens,
    }
    record |= {"prompts": len(prompts), "rounds": rounds, "base": BASE, "decoders": of_decoders, "machine": machine}
    record["on"] = (
        f"{info.model_name}, {info.dtype}, {info.device}, {info.forward} forward pass, {info.linears} linear layers: "
        f"{one_line(machine)}"
    )
    if json:
        print_json(dumps(record, ensure_ascii=False))
    else:
        console = output(no_color)
        console.print(_table(record, len(finished)))
        console.print(Text(record["on"], style="dim"))
    if interrupt is not None:
        print_note(f"{len(finished)} of {count(rounds, 'round')} were finished; the output is of these")
        raise interrupt


def _table(record: dict[str, Any], finished: int) -> Table:
    from cocoa_engine.lab.timing import Spread

    rounds = f"{finished} of {record['rounds']}, incomplete" if finished < record["rounds"] else finished
    title = f"Per kept token, median (prompts: {record['prompts']}, new tokens: {record['tokens']}, rounds: {rounds})"
    numbers = ("ms", "ratio", "lowest-highest", "forward passes", "risk points")
    table = plain_table("decoder", *(Column(name, justify="right") for name in numbers), title=title)
    for name, decoder in record["decoders"].items():
        ratio, per_token = decoder["ratio"], decoder["per_kept_token"]
        table.add_row(
            name,
            f"{1000 * Spread.of(decoder['seconds_per_token']).median:.1f}",
            f"{ratio['median']:.2f}",
            f"{ratio['lowest']:.2f}-{ratio['highest']:.2f}",
            *(f"{per_token[field]:.2f}" if per_token else "" for field in PER_TOKEN),
        )
    return table
