"""``cocoa ask``: answer a question, with the answer coloured by risk."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Annotated, Final, Literal

import typer

from cocoa_engine.cli.answer_json import answer_json
from cocoa_engine.cli.export import Html, Svg, check_writable, write
from cocoa_engine.cli.live_answer import decode_live
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Calibrator, Details, Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.prompting import Question, Raw, Sources, System, ask_engine, read_request
from cocoa_engine.cli.terminal import can_redraw, output, print_json, print_note
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ConfigError
from cocoa_engine.rendering.documents import render
from cocoa_engine.rendering.scale import RAW
from cocoa_engine.rendering.svg import document as picture
from cocoa_engine.rendering.terminal import report, spans_text
from cocoa_engine.results import Generation
from cocoa_engine.risk import MeasuredText, riskiest
from cocoa_engine.safe_text import short_repr
from cocoa_engine.spans import Span

TOO_RISKY = 3
"""The exit code of ``--fail-on-risk``."""

AUTO: Final = "auto"


@with_options()
def ask(
    config: CocoaConfig,
    loading: LoadOptions,
    prompt: Question = None,
    model: Model = None,
    calibrator: Calibrator = None,
    system: System = None,
    source: Sources = None,
    raw: Raw = False,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD", help="Also answer with another method, such as greedy, and mark the differences."
        ),
    ] = None,
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
    --compare, --details, --no-color or --json is given. If --max-risk stopped the answer, a line on stderr says so.
    With --fail-on-risk, the exit code is 3 if the risk reaches the value.
    """
    compared_config = config.replace(method=compare) if compare is not None else None
    request = read_request(prompt, system=system, raw=raw, sources=source)
    check_writable(svg=svg, html=html)
    limit = None if fail_on_risk is None else _limit(fail_on_risk, config)
    progress = Progress("ask")
    engine = load_engine(model, loading, calibrator, progress=progress)
    console = output(no_color)
    marks = console.color_system is None
    plain = not (console.is_terminal or compared_config or table or no_color)

    def decode(settings: CocoaConfig, spans: list[Span]) -> Generation:
        with ask_engine(engine, request, settings) as stream:
            draw = partial(spans_text, marks=marks)
            draws = not json and can_redraw(console)
            return decode_live(stream, console, spans, draw, draws=draws, progress=progress)

    decoded: list[Span] = []
    try:
        generation = decode(config, decoded)
    except KeyboardInterrupt:
        if plain and not json:
            print("".join(span.text for span in decoded))
        elif not json:
            console.print(spans_text(decoded, marks=marks))
        unwritten = "" if svg is None and html is None else "; no file was written"
        if json:
            print_note(f"the answer was not complete, so no JSON is printed{unwritten}")
        else:
            print_note(f"the answer above is incomplete: {len(decoded)} spans were decoded{unwritten}")
        raise

    compared, interrupt = None, None
    try:
        compared = decode(compared_config, []) if compared_config else None
    except KeyboardInterrupt as error:  # the first answer is complete
        interrupt = error
    generations = [generation, compared] if compared else [generation]
    if json and compared_config:
        other = "null" if compared is None else answer_json(compared)
        print_json(f'{{"answer": {answer_json(generation)}, "compared": {other}}}')
    elif json:
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
        console.print(report(generations, table=table, marks=marks))
    if svg:
        write(svg, picture(generations, title=request.question, table=table))
    if html:
        write(html, render(generations, "html", title=request.question))
    if interrupt is not None:
        print_note(f"the answer of {compare} was not complete; that of {config.method} is kept")
        raise interrupt
    if limit == AUTO:
        limit = threshold_of(generation)
    if isinstance(limit, float) and not (risk := risk_of(generation)) < limit:
        print_note(f"the risk of the answer, {risk:.3f}, reaches --fail-on-risk {limit:g}")
        raise typer.Exit(TOO_RISKY)


def _limit(given: str, config: CocoaConfig) -> float | Literal["auto"]:
    """The value of ``--fail-on-risk``.

    Raises:
        ConfigError: it is neither a risk nor ``auto``, or the settings make no risk in [0, 1].
    """
    if config.risk in RAW:
        raise ConfigError(f"--fail-on-risk takes a risk in [0, 1]; --risk {config.risk} is a raw MLDS: leave it out")
    if given == AUTO:
        return AUTO
    try:
        limit = float(given)
    except ValueError:
        limit = math.nan
    if not 0 <= limit <= 1:
        raise ConfigError(f"--fail-on-risk takes a number in [0, 1], or auto (got {short_repr(given)})")
    return limit


def threshold_of(generation: Generation) -> float | None:
    """The threshold of the risk of :func:`risk_of`, as gates use it by default."""
    return generation.threshold if generation.answer_risk is None else generation.answer_threshold


def risk_of(generation: Generation) -> float:
    """The risk of an answer as a whole; without a calibrator for answers, that of its riskiest claim.

    In an answer without claims it is that of its riskiest sentence; 0 without text.
    """
    if generation.answer_risk is not None:
        return generation.answer_risk
    units = MeasuredText(generation.text, generation.spans).compared("claim")
    return riskiest(one.risk for one in units) or 0.0
