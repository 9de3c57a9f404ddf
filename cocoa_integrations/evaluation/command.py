"""``cocoa eval`` compares decoding methods on a data file, and ``cocoa judge`` lets an LLM judge the answers."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocoa_engine import CocoaConfig
from cocoa_engine.cli.info import declared_options, load_engine
from cocoa_engine.cli.options import Calibrator, LoadOptions, Model, Runner, with_options
from cocoa_engine.cli.output import Progress, on_interrupt, output
from cocoa_engine.errors import ConfigError, MissingExtraError
from cocoa_engine.integration import MODEL_NAME, need
from cocoa_engine.rendering.terminal import show

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

    from cocoa_integrations.evaluation.judge import Lines

Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown, also on a terminal.")]
PaperModel = Annotated[
    str | None, typer.Option(help="Model of the paper to compare with. Default: the most similar one.")
]


@with_options(*(name for name in CocoaConfig.model_fields if name not in ("method", "metric", "alpha")))
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
    paper_model: PaperModel = None,
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
    from cocoa_integrations.evaluation.harness import evaluate as run
    from cocoa_integrations.evaluation.table import choose_model, report
    from cocoa_integrations.evaluation.tasks import describe_data, find_task, load_samples, make_arms

    progress = Progress("eval")

    def load() -> Any:
        if runner is None:
            return load_engine(model, loading, calibrator, progress=progress)
        return runner(declared_options(model, loading, calibrator), threads=loading.threads)

    chosen, name = find_task(task), model or MODEL_NAME
    out = out or Path(f"{chosen.name}-{name.rstrip('/').rpartition('/')[2]}")
    lists = [[part.strip() for part in text.split(",") if part.strip()] for text in (methods, metrics, alphas)]
    try:
        weights = [float(alpha) for alpha in lists[2]]
    except ValueError as error:
        raise ConfigError(f"alpha: {str(error).partition('float: ')[2]} is not a number") from None
    arms = make_arms(lists[0], lists[1], weights)
    choose_model(chosen.name, name, paper_model)  # reports a wrong name before the evaluation
    samples = load_samples(chosen.name, data, limit=limit, shuffle=shuffle)
    # without --forward, --threads and --device-map, which change results only by rounding
    described = {"name": name, "dtype": loading.dtype}
    if loading.weights != "stored":
        described["weights"] = loading.weights
    if calibrator is not None:
        described["calibrator"] = (
            sha256(calibrator.read_bytes()).hexdigest() if calibrator.is_file() else str(calibrator)
        )
    interrupted = on_interrupt(f"what was measured is kept in {out}: repeat the command to resume")
    requests = chosen.requests(samples) * len(arms)
    with interrupted, progress.stage(chosen.name, f"answers of {chosen.name}", requests) as stage:
        results = run(
            load,
            chosen,
            samples,
            arms,
            out,
            config=config,
            model=described,
            data=describe_data(data, shuffle=shuffle),
            limit=limit,
            paper_model=paper_model,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
            advance=stage.advance,
        )
    show(report(chosen, results, paper_model), output(no_color=False), as_markdown=markdown)


FACTS = 5.0  # that a summary states, about, for the time left


def judge(
    folder: Annotated[Path, typer.Argument(help="The --out folder of a cocoa eval.")],
    judge: Annotated[
        str,
        typer.Option(help="The judge: provider:model, for LangChain's init_chat_model. Its package must be installed."),
    ],
    attempts: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of attempts per prompt.")] = 3,
    timeout: Annotated[float, typer.Option(min=0.001, max=10**6, help="Time limit for one reply in seconds.")] = 120.0,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of concurrent prompts.")] = 4,
    paper_model: PaperModel = None,
    factscore: Annotated[
        bool,
        typer.Option(
            "--factscore",
            help="Measure FActScore instead: the share of atomic facts of each summary (samsum, "
            "xsum) that its document supports.",
        ),
    ] = False,
    gamma: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=10**6,
            help="Length penalty of FActScore, for summaries of at most this many facts; its code uses 10. "
            "Default: none.",
        ),
    ] = None,
    markdown: Markdown = False,
) -> None:
    """Judge the answers of an evaluation with an LLM and the paper's prompts. Stored verdicts are reused."""
    from cocoa_integrations.evaluation.judge import factscore_report, factscore_run, judge_run, judged_report

    if gamma is not None and not factscore:
        raise ConfigError("--gamma is the length penalty of --factscore")
    model = chat_model(judge)
    progress = Progress("judge")
    stages = [("judging", "prompts")]
    if factscore:
        stages = [("splitting", "summaries"), ("checking", "facts")]
        progress.plan({"splitting": 1.0, "checking": FACTS})
    calls: Any = {"name": judge, "attempts": attempts, "timeout": timeout, "concurrency": concurrency}
    interrupted = on_interrupt(f"the verdicts so far are kept in {folder}: repeat the command to resume")

    def track(replies: Iterator["Lines"], total: int) -> Iterator["Lines"]:
        with progress.stage(*stages.pop(0), total) as stage:
            for lines in replies:
                yield lines
                stage.advance()

    with interrupted:
        if factscore:
            shown = factscore_report(factscore_run(folder, model, gamma=gamma, track=track, **calls))
        else:
            results = judge_run(folder, model, paper_model=paper_model, track=track, **calls)
            shown = judged_report(results, paper_model)
    show(shown, output(no_color=False), as_markdown=markdown)


def chat_model(name: str) -> "BaseChatModel":
    """The chat model of a judge, ``provider:model``."""
    chat_models = need("langchain.chat_models", extra="agents", what="cocoa judge")
    try:
        model: BaseChatModel = chat_models.init_chat_model(name, temperature=0.0)
        return model
    except ImportError as error:
        raise MissingExtraError(f"the judge {name}: {error}") from error
    except Exception as error:  # a missing key or an unknown name; the errors of providers have no common base
        raise ConfigError(f"the judge {name} cannot be used: {error}") from error
