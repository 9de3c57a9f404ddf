"""``cocoa judge``: an LLM judges the answers of a ``cocoa eval``. Registered as an entry point of ``cocoa``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cocoa_engine.cli.output import on_interrupt
from cocoa_engine.cli.progress import Progress, Stage
from cocoa_engine.errors import ConfigError, MissingExtraError, safe_cause
from cocoa_engine.optional import need
from cocoa_integrations.evaluation.command import Markdown

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

FACTS = 5.0
"""About how many facts a summary states, for the time left."""


def judge(
    folder: Annotated[Path, typer.Argument(help="The --out folder of a cocoa eval.")],
    judge: Annotated[
        str,
        typer.Option(help="The judge: provider:model, for LangChain's init_chat_model. Its package must be installed."),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            help="CSV file with human labels for Cohen's kappa: columns arm, id, and for each annotator NAME (truth) "
            "or NAME:info (informativeness)."
        ),
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of attempts per prompt.")] = 3,
    timeout: Annotated[float, typer.Option(min=0.001, max=10**6, help="Time limit for one reply in seconds.")] = 120.0,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of concurrent prompts.")] = 4,
    paper_model: Annotated[
        str | None, typer.Option(help="Model of the paper to compare with. Default: the most similar one.")
    ] = None,
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
    from cocoa_integrations.evaluation.factscore import factscore_report, factscore_run
    from cocoa_integrations.evaluation.judge import judge_run, judged_report
    from cocoa_integrations.evaluation.table_text import show

    if factscore and labels is not None:
        raise ConfigError("--labels is for judged answers, not for --factscore")
    if gamma is not None and not factscore:
        raise ConfigError("--gamma is the length penalty of --factscore")
    model = chat_model(judge)
    progress = Progress("judge")
    kept = on_interrupt(f"the verdicts so far are kept in {folder}: repeat the command to resume")
    if factscore:
        progress.plan({"splitting": 1.0, "checking": FACTS})
        parts = iter((("splitting", "summaries"), ("checking", "facts")))
        with kept, ExitStack() as running:
            begun: list[Stage] = []

            def begin(done: int, total: int) -> None:
                running.close()  # the part before
                begun.append(running.enter_context(progress.stage(*next(parts), total)))

            found = factscore_run(
                folder,
                model,
                name=judge,
                gamma=gamma,
                attempts=attempts,
                timeout=timeout,
                concurrency=concurrency,
                begin=begin,
                advance=lambda count: begun[-1].advance(count),
            )
        show(factscore_report(found), as_markdown=markdown)
        return
    with kept, progress.stage("judging", "prompts") as stage:
        results = judge_run(
            folder,
            model,
            name=judge,
            labels=labels,
            attempts=attempts,
            timeout=timeout,
            concurrency=concurrency,
            paper_model=paper_model,
            begin=lambda total: stage.at(0, total),
            advance=stage.advance,
        )
    show(judged_report(results, paper_model), as_markdown=markdown)


def chat_model(name: str) -> BaseChatModel:
    """The chat model of a judge, ``provider:model``.

    Raises:
        MissingExtraError: its package is not installed.
        ConfigError: its key is missing, or its name is not known.
    """
    chat_models = need("langchain.chat_models", extra="agents", what="cocoa judge")
    try:
        model: BaseChatModel = chat_models.init_chat_model(name, temperature=0.0)
        return model
    except ImportError as error:
        raise MissingExtraError(f"the judge {name}: {error}") from safe_cause(error)
    except Exception as error:  # a missing key or an unknown name; the errors of providers have no common base
        raise ConfigError(f"the judge {name} cannot be used: {error}") from safe_cause(error)
