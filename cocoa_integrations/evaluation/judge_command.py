"""``cocoa judge``: an LLM judges the answers of a ``cocoa eval``. Registered as an entry point of ``cocoa``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cocoa_engine.cli.terminal import on_interrupt
from cocoa_engine.errors import ConfigError, MissingExtraError
from cocoa_engine.optional import need
from cocoa_integrations.evaluation.progress import progress_bar

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel


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
    attempts: Annotated[int, typer.Option(min=1, help="Maximum number of attempts per prompt.")] = 3,
    timeout: Annotated[float, typer.Option(help="Time limit for one reply in seconds.")] = 120.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent prompts.")] = 4,
    paper_model: Annotated[
        str | None, typer.Option(help="Model of the paper to compare with. Default: the most similar one.")
    ] = None,
) -> None:
    """Judge the answers of an evaluation with an LLM and the paper's prompts. Stored verdicts are reused."""
    from cocoa_integrations.evaluation.judge import JUDGED_TABLE, judge_run

    model = _chat_model(judge)
    kept = on_interrupt(f"the verdicts so far are kept in {folder}: repeat the command to resume")
    with kept, progress_bar("judging") as (begin, advance):
        judge_run(
            folder,
            model,
            name=judge,
            labels=labels,
            attempts=attempts,
            timeout=timeout,
            concurrency=concurrency,
            paper_model=paper_model,
            begin=lambda total: begin(0, total),
            advance=advance,
        )
    print((folder / JUDGED_TABLE).read_text(encoding="utf-8"), end="")


def _chat_model(name: str) -> BaseChatModel:
    chat_models = need("langchain.chat_models", extra="agents", what="cocoa judge")
    try:
        model: BaseChatModel = chat_models.init_chat_model(name, temperature=0.0)
        return model
    except ImportError as error:
        raise MissingExtraError(f"the judge {name}: {error}") from error
    except Exception as error:  # a missing key or an unknown name; the errors of providers have no common base
        raise ConfigError(f"the judge {name} cannot be used: {error}") from error
