"""``cocoa compare``: the answers of several methods to one question, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from cocoa_engine.cli.ask import answer_json, answers_json, first_span
from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.options import Calibrator, Details, Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.output import Html, check_writable, output, print_json, print_note, write
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.prompting import Question, Raw, Sources, System, ask_engine, read_request
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.rendering.documents import render
from cocoa_engine.rendering.terminal import report
from cocoa_engine.rendering.wording import count
from cocoa_engine.results import Generation


@with_options(*(name for name in CocoaConfig.model_fields if name != "method"))
def compare(
    config: CocoaConfig,
    loading: LoadOptions,
    prompt: Question = None,
    methods: Annotated[
        str, typer.Option(help="The methods to compare, at least two. Differences are marked against the first.")
    ] = "greedy,cocoa-sig",
    model: Model = None,
    calibrator: Calibrator = None,
    system: System = None,
    source: Sources = None,
    raw: Raw = False,
    table: Details = False,
    json: Json = False,
    no_color: NoColor = False,
    html: Html = None,
) -> None:
    """Answer a question with several methods and show the answers side by side, with the differences marked."""
    configs = [config.replace(method=method) for method in _methods(methods)]
    request = read_request(prompt, system=system, raw=raw, sources=source)
    check_writable(html=html)
    progress = Progress("compare")
    engine = load_engine(model, loading, calibrator, progress=progress)
    generations: list[Generation] = []
    interrupt: KeyboardInterrupt | None = None
    try:
        with progress.stage("answering", "answers", len(configs)) as stage:
            for one in configs:
                with ask_engine(engine, request, one) as stream:
                    first_span(stream, progress)
                    for _ in stream:
                        pass
                assert stream.generation is not None
                generations.append(stream.generation)
                stage.advance()
    except KeyboardInterrupt as error:
        if not generations:
            print_note("no answer was complete")
            raise
        interrupt = error
    if json:
        print_json(answers_json([answer_json(one) for one in generations]))
    else:
        console = output(no_color)
        console.print(report(generations, table=table, marks=console.color_system is None))
    if html:
        write(html, render(generations, "html", title=request.question))
    if interrupt is not None:
        print_note(f"{len(generations)} of {count(len(configs), 'answer')} were complete and are kept")
        raise interrupt


def _methods(given: str) -> list[str]:
    methods = [name.strip() for name in given.split(",")]
    if len(methods) < 2 or len(set(methods)) < len(methods):
        raise ConfigError(f"--methods takes two or more different methods, such as greedy,cocoa-sig (got {given!r})")
    return methods
