"""``cocoa eval``: compare decoding methods on a data file. Registered as an entry point of ``cocoa``."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from cocoa_engine.cli.info import declared_options, load_engine
from cocoa_engine.cli.labelled import short_name
from cocoa_engine.cli.options import Calibrator, LoadOptions, Model, Runner, with_options
from cocoa_engine.cli.output import on_interrupt
from cocoa_engine.cli.progress import Progress
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.model.embedded import MODEL_NAME

Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown, also on a terminal.")]

_SWEPT = ("method", "metric", "alpha")
_SHARED = tuple(name for name in CocoaConfig.model_fields if name not in _SWEPT)


@with_options(*_SHARED)
def evaluate(
    config: CocoaConfig,
    loading: LoadOptions,
    task: Annotated[
        str,
        typer.Argument(help="truthfulqa_gen, truthfulqa_mc, nq, nq_swap, samsum, xsum, mbpp or gsm8k."),
    ],
    data: Annotated[Path, typer.Option(help="The task's data file (CSV, JSON, JSON lines, parquet), or its folder.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results. An interrupted run is resumed in its folder. Default: ./TASK-MODEL.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    calibrator: Calibrator = None,
    methods: Annotated[str, typer.Option(help="Decoding methods, comma-separated.")] = "greedy,cocoa,cocoa-sig",
    metrics: Annotated[str, typer.Option("--metric", help="MLDS metrics, comma-separated.")] = "f_mlds",
    alphas: Annotated[str, typer.Option("--alpha", help="Penalty weights, comma-separated.")] = "2.5",
    limit: Annotated[int | None, typer.Option(min=1, max=10**7, help="Maximum number of samples.")] = None,
    shuffle: Annotated[int | None, typer.Option(help="Seed for shuffling the samples before --limit.")] = None,
    paper_model: Annotated[
        str | None, typer.Option(help="Model of the paper to compare with. Default: the most similar one.")
    ] = None,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code",
            help="Run the code that the model writes for mbpp also where bubblewrap does not confine it.",
        ),
    ] = False,
    markdown: Markdown = False,
    runner: Runner = None,
) -> None:
    """Evaluate decoding methods on a benchmark's data file, with a table like those of the paper."""
    from cocoa_integrations.evaluation.arms import make_arms
    from cocoa_integrations.evaluation.data import describe_data, load_samples
    from cocoa_integrations.evaluation.harness import evaluate as run
    from cocoa_integrations.evaluation.paper import choose_model
    from cocoa_integrations.evaluation.table import report
    from cocoa_integrations.evaluation.table_text import show
    from cocoa_integrations.evaluation.tasks import find_task

    progress = Progress("eval")

    def load() -> Any:
        if runner is None:
            return load_engine(model, loading, calibrator, progress=progress)
        return runner(declared_options(model, loading, calibrator), threads=loading.threads)

    chosen = find_task(task)
    out = out or Path(f"{chosen.name}-{short_name(model)}")
    arms = make_arms(_list(methods), _list(metrics), [_number(alpha) for alpha in _list(alphas)])
    choose_model(chosen.name, model or MODEL_NAME, paper_model)  # reports a wrong name before the evaluation
    samples = load_samples(chosen.name, data, limit=limit, shuffle=shuffle)
    kept = on_interrupt(f"what was measured is kept in {out}: repeat the command to resume")
    with kept, progress.stage(chosen.name, f"answers of {chosen.name}") as stage:
        results = run(
            load,
            chosen,
            samples,
            arms,
            out,
            config=config,
            # without --forward, --threads and --device-map, which change results only by rounding
            model={"name": model or MODEL_NAME, "dtype": loading.dtype}
            | ({} if loading.weights == "stored" else {"weights": loading.weights})
            | ({} if calibrator is None else {"calibrator": _identity(calibrator)}),
            data=describe_data(data, shuffle=shuffle),
            limit=limit,
            paper_model=paper_model,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
            begin=stage.at,
            advance=stage.advance,
        )
    show(report(chosen, results, paper_model), as_markdown=markdown)


def _identity(calibrator: Path) -> str:
    """A digest of a calibrator's file, or the word that was given instead of a file."""
    return sha256(calibrator.read_bytes()).hexdigest() if calibrator.is_file() else str(calibrator)


def _list(given: str) -> list[str]:
    return [part.strip() for part in given.split(",") if part.strip()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"alpha: {text!r} is not a number") from None
