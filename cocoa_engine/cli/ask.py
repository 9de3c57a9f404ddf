"""cocoa ask and cocoa compare: answers with the risk of their parts."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from json import dumps, loads
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.options import Calibrator, Details, Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.output import Html, Svg, can_redraw, check_writable, live, output, print_json, print_note, write
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.prompting import Request
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.rendering.documents import render, svg_document
from cocoa_engine.rendering.terminal import report, spans_text
from cocoa_engine.rendering.wording import count
from cocoa_engine.results import Generation
from cocoa_engine.risk import MeasuredText, riskiest
from cocoa_engine.safe_text import short_repr
from cocoa_engine.spans import RAW, Span

if TYPE_CHECKING:
    from cocoa_engine import SpanStream


TOO_RISKY = 3
"""The exit code of ``--fail-on-risk``."""

_LIMIT: TypeAdapter[float | Literal["auto"]] = TypeAdapter(Literal["auto"] | Annotated[float, Field(ge=0, le=1)])


def answer_json(generation: Generation, divided: Generation | None = None) -> str:
    """An answer as JSON, with its verdict, claims and sentences, and the claims to check.

    If it is one span, these are of the same text ``divided`` at its risk points, without the numbers of their spans.
    """
    measured, left_out = divided or generation, {"spans"} if divided else None
    units: dict[str, Sequence[BaseModel]] = {"check": measured.check_these(), "claims": measured.claims}
    units["sentences"] = measured.sentences
    record = {**loads(generation.model_dump_json()), "verdict": measured.verdict}
    record |= {name: [loads(part.model_dump_json(exclude=left_out)) for part in parts] for name, parts in units.items()}
    return dumps(record, ensure_ascii=False, separators=(",", ":"))


def decode_live(
    stream: "SpanStream",
    console: Console,
    spans: list[Span],
    drawn: Callable[[Sequence[Span]], Text],
    *,
    draws: bool,
    progress: Progress,
) -> Generation:
    """Decode an answer and show it as it grows; what was shown is cleared at the end.

    ``spans`` receives every span, so that the caller has them after an interrupt. Without ``draws`` nothing is shown,
    as on a terminal that cannot redraw lines.
    """
    first = first_span(stream, progress)
    drawing = live(console, renderable=Text("…"), auto_refresh=False)
    with drawing if draws else progress.stage("answering") as screen:
        for span in chain(first, stream):
            spans.append(span)
            if isinstance(screen, Live):
                lines = drawn(spans).wrap(console, console.width)[-(console.height - 1) :]  # the last screenful
                screen.update(Text("\n").join(lines), refresh=True)
    assert stream.generation is not None
    return stream.generation


def first_span(stream: "SpanStream", progress: Progress) -> list[Span]:
    """The first span, if the prompt is long. How much of it is read is shown."""
    from cocoa_engine.execution.backends.shared_cache import PREFILL_CHUNK

    if (total := len(stream.prompt)) <= PREFILL_CHUNK:
        return []
    with progress.stage("reading", "tokens of the prompt", total, done=lambda: stream.prompt_progress[0]):
        return list(islice(stream, 1))


@with_options()
def ask(
    config: CocoaConfig,
    loading: LoadOptions,
    request: Request,
    model: Model = None,
    calibrator: Calibrator = None,
    table: Details = False,
    fail_on_risk: Annotated[
        str | None,
        typer.Option(
            metavar="RISK|auto",
            help="Exit with code 3 if the risk of the answer as a whole is at least this; without a calibrator for "
            "answers, the risk of its riskiest claim. auto: the threshold of the answer's report.",
        ),
    ] = None,
    json: Json = False,
    no_color: NoColor = False,
    svg: Svg = None,
    html: Html = None,
) -> None:
    """Ask a question. The output is a verdict, the answer with its riskiest claims shaded, and the claims to check.

    In a pipe or a file, the output is the plain text of the answer, and the verdict is a line on stderr, unless
    --details, --no-color or --json is given. If --max-risk stopped the answer, a line on stderr says so.
    With --fail-on-risk, the exit code is 3 if the risk reaches the value.
    """
    check_writable(svg=svg, html=html)
    if fail_on_risk is not None:
        if config.risk in RAW:
            raise ConfigError(
                f"--fail-on-risk takes a risk in [0, 1]; --risk {config.risk} is a raw MLDS: leave it out"
            )
        try:
            limit = _LIMIT.validate_python(fail_on_risk)
        except ValidationError:
            raise ConfigError(
                f"--fail-on-risk takes a number in [0, 1], or auto (got {short_repr(fail_on_risk)})"
            ) from None
    progress = Progress("ask")
    engine = load_engine(model, loading, calibrator, progress=progress)
    console = output(no_color)
    marks = console.color_system is None
    plain = not (console.is_terminal or table or no_color)

    decoded: list[Span] = []
    try:
        with request.ask(engine, config) as stream:
            draw = partial(spans_text, marks=marks)
            draws = not json and can_redraw(console)
            generation = decode_live(stream, console, decoded, draw, draws=draws, progress=progress)
    except KeyboardInterrupt:
        if not json:
            print("".join(span.text for span in decoded)) if plain else console.print(spans_text(decoded, marks=marks))
        lost = "answer was not complete, so no JSON is printed"
        rest = f"answer above is incomplete: {len(decoded)} spans were decoded"
        print_note(f"the {lost if json else rest}{'; no file was written' if svg or html else ''}")
        raise

    if json:
        print_json(answer_json(generation))
    elif plain:
        print(generation.text)
        sys.stdout.flush()
        print_note(generation.verdict)
        if generation.finish_reason == "risk":
            print_note(
                f"stopped: the last span's risk, {generation.spans[-1].risk:.3f}, reaches max_risk {config.max_risk}"
            )
    else:
        console.print(report([generation], table=table, marks=marks))
    if svg:
        write(svg, svg_document([generation], title=request.question, table=table))
    if html:
        write(html, render([generation], "html", title=request.question))
    if fail_on_risk is not None:
        threshold = generation.threshold if generation.answer_risk is None else generation.answer_threshold
        least, risk = threshold if limit == "auto" else limit, risk_of(generation)
        if least is not None and not risk < least:
            print_note(f"the risk of the answer, {risk:.3f}, reaches --fail-on-risk {least:g}")
            raise typer.Exit(TOO_RISKY)


def risk_of(generation: Generation) -> float:
    """The risk of an answer as a whole; without a calibrator for answers, that of its riskiest claim.

    In an answer without claims it is that of its riskiest sentence; 0 without text.
    """
    if generation.answer_risk is not None:
        return generation.answer_risk
    units = MeasuredText(generation.text, generation.spans).compared("claim")
    return riskiest(unit.risk for unit in units) or 0.0


@with_options(*(name for name in CocoaConfig.model_fields if name != "method"))
def compare(
    config: CocoaConfig,
    loading: LoadOptions,
    request: Request,
    methods: Annotated[
        str, typer.Option(help="The methods to compare, at least two. Differences are marked against the first.")
    ] = "greedy,cocoa-sig",
    model: Model = None,
    calibrator: Calibrator = None,
    table: Details = False,
    json: Json = False,
    no_color: NoColor = False,
    html: Html = None,
) -> None:
    """Answer a question with several methods and show the answers side by side, with the differences marked."""
    names = [name.strip() for name in methods.split(",")]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"--methods takes two or more different methods, such as greedy,cocoa-sig (got {methods!r})")
    configs = [config.replace(method=name) for name in names]
    check_writable(html=html)
    progress = Progress("compare")
    engine = load_engine(model, loading, calibrator, progress=progress)
    generations: list[Generation] = []
    interrupt: KeyboardInterrupt | None = None
    try:
        with progress.stage("answering", "answers", len(configs)) as stage:
            for of_method in configs:
                with request.ask(engine, of_method) as stream:
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
        print_json(f"[{','.join(map(answer_json, generations))}]")
    else:
        console = output(no_color)
        console.print(report(generations, table=table, marks=console.color_system is None))
    if html:
        write(html, render(generations, "html", title=request.question))
    if interrupt is not None:
        print_note(f"{len(generations)} of {count(len(configs), 'answer')} were complete and are kept")
        raise interrupt
