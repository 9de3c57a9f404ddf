"""``cocoa judge``: an LLM judges the answers of a ``cocoa eval``. Plugged into ``cocoa`` as an entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cocoa_engine.errors import ConfigError, MissingExtraError
from cocoa_engine.extras import need
from cocoa_integrations.evaluation.progress import progress_bar


def judge(
    folder: Annotated[Path, typer.Argument(help="The --out folder of a cocoa eval.")],
    judge: Annotated[
        str,
        typer.Option(help="The judge: provider:model, as LangChain's init_chat_model takes it. Its package is needed."),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Human labels, for Cohen's kappa: a CSV file with arm, id, and for each annotator a column NAME about "
            "truth, NAME:info about informativeness."
        ),
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, help="How often a question is asked until there is a verdict.")] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds for one reply.")] = 120.0,
    concurrency: Annotated[int, typer.Option(min=1, help="At most so many questions at a time.")] = 4,
    paper_model: Annotated[
        str | None, typer.Option(help="Whose figures of the paper stand beside ours. Default: the most alike.")
    ] = None,
) -> None:
    """Let an LLM judge the answers of an evaluation, with the paper's prompts. What it said is not asked again."""
    from cocoa_integrations.evaluation.judge import JUDGED_TABLE, judge_run

    model = _chat_model(judge)
    with progress_bar("judging") as (begin, advance):
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


def _chat_model(name: str) -> Any:
    chat_models = need("langchain.chat_models", extra="agents", what="cocoa judge")
    try:
        return chat_models.init_chat_model(name, temperature=0.0)
    except ImportError as error:
        raise MissingExtraError(f"the judge {name}: {error}") from error
    except Exception as error:  # what a provider says of a key that is missing, or of a name it does not know
        raise ConfigError(f"the judge {name} cannot be used: {error}") from error
