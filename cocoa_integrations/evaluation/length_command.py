"""``cocoa length-rules``: compare the rules for candidates of unequal length. Registered as an entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cocoa_engine.cli.loading import NO_CALIBRATOR, load_engine
from cocoa_engine.cli.options import LoadOptions, Model, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import on_interrupt
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_engine.optional import quiet_torchao
from cocoa_integrations.evaluation.command import Markdown

_SHARED = ("gamma", "max_candidates", "max_span_tokens", "span_boundary", "middle_layers", "final_layer",
           "repetition_penalty", "max_new_tokens")  # fmt: skip


@with_options(*_SHARED)
def length_rules(
    config: CocoaConfig,
    loading: LoadOptions,
    data: Annotated[list[str], typer.Option(metavar="TASK=PATH", help="A task and its data file. Repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the results. An interrupted run is resumed in its folder.")],
    model: Model = None,
    methods: Annotated[str, typer.Option(help="Methods, comma-separated. Greedy is the baseline.")] = "cocoa,cocoa-sig",
    rules: Annotated[str | None, typer.Option(help="Rules (span_log_prob), comma-separated. Default: all.")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, max=10**7, help="Maximum number of prompts of each task.")
    ] = None,
    shuffle: Annotated[int | None, typer.Option(help="Seed for shuffling the samples before --prompts.")] = None,
    markdown: Markdown = False,
) -> None:
    """Compare rules for candidates of unequal length with greedy decoding, on the data files of several tasks."""
    with quiet_torchao():
        from cocoa_integrations.evaluation.data import describe_data, load_samples
        from cocoa_integrations.evaluation.length_rules import RULES, make_rule_arms, study
        from cocoa_integrations.evaluation.length_table import report
        from cocoa_integrations.evaluation.table_text import show
        from cocoa_integrations.evaluation.tasks import find_task

    arms = make_rule_arms(_list(methods), RULES if rules is None else _list(rules))
    files: dict[str, Path] = {}
    for given in data:
        name, separator, path = given.partition("=")
        if not separator:
            raise ConfigError(f"--data {given}: give a task and its data file, such as samsum=test.jsonl")
        files[find_task(name).name] = Path(path)
    tasks = [
        (find_task(name), load_samples(name, path, limit=prompts, shuffle=shuffle)) for name, path in files.items()
    ]
    kept = on_interrupt(f"the finished samples are kept in {out}: repeat the command to resume")
    progress = Progress("length-rules")
    with kept, progress.stage("answering", "answers") as stage:
        results = study(
            lambda: load_engine(model, loading, NO_CALIBRATOR, progress=progress),
            tasks,
            arms,
            out,
            config=config,
            model={"name": model or MODEL_NAME, "dtype": loading.dtype},
            data={name: describe_data(path, shuffle=shuffle) for name, path in files.items()},
            limit=prompts,
            begin=stage.at,
            advance=stage.advance,
        )
    show(report(results), as_markdown=markdown)


def _list(given: str) -> list[str]:
    return [part.strip() for part in given.split(",") if part.strip()]
