"""``cocoa ask``: a question, its answer coloured by risk, and if wanted why it is so and what greedy says."""

from __future__ import annotations

import io
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Calibrator, Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.terminal import draws_on_screen, output, print_json
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError
from cocoa_engine.rendering import report, spans_text
from cocoa_engine.results import Generation, Span

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine, SpanStream

PICTURE_WIDTH = 92  # columns


@with_options()
def ask(
    config: CocoaConfig,
    loading: LoadOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The question. None or -: it is read from stdin.", show_default=False)
    ] = None,
    model: Model = None,
    calibrator: Calibrator = None,
    system: Annotated[str | None, typer.Option(help="A system message that precedes the question.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without the model's chat template.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD", help="Answer with another method too, such as greedy, and show where the two part."
        ),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table/--no-table", help="Show every candidate of every risk point.", show_default=False)
    ] = False,
    json: Json = False,
    no_color: NoColor = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also draw what is shown into an SVG picture.")
    ] = None,
) -> None:
    """Ask a question. The answer streams, coloured by the risk of each span.

    In a pipe or a file, stdout is the bare answer, unless --compare, --table, --no-color or --json asks for more.
    """
    compared_config = config.replace(method=compare) if compare is not None else None
    if raw and system is not None:
        raise ConfigError("--system is part of a chat and --raw asks without one: leave out one of the two")
    if svg:
        _check_writable(svg)
    prompt = _prompt(prompt)
    engine = load_engine(model, loading, calibrator)
    console = output(no_color)
    marks = console.color_system is None
    bare = not (console.is_terminal or compared_config or table or no_color)

    def decode(settings: CocoaConfig, spans: list[Span]) -> Generation:
        with _stream(engine, prompt, system, raw, settings) as stream, _screen(console, draws=not json) as draw:
            for span in stream:
                spans.append(span)
                draw(spans_text(spans, marks=marks))
        assert stream.generation is not None
        return stream.generation

    decoded: list[Span] = []
    try:
        generation = decode(config, decoded)
        compared = decode(compared_config, []) if compared_config else None
    except KeyboardInterrupt:
        if bare and not json:
            print("".join(span.text for span in decoded))
        elif not json:
            console.print(spans_text(decoded, marks=marks))
        raise

    if json and compared:
        parts = {"answer": generation.model_dump(mode="json"), "compared": compared.model_dump(mode="json")}
        print_json(dumps(parts, ensure_ascii=False))
    elif json:
        print_json(generation.model_dump_json())
    elif bare:
        print(generation.text)
    else:
        console.print(report(generation, compared=compared, table=table, marks=marks))
    if svg:
        svg.write_text(_picture(report(generation, compared=compared, table=table), prompt), encoding="utf-8")


def _check_writable(picture: Path) -> None:
    try:
        picture.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--svg {picture} cannot be written: {error.strerror}") from error


def _prompt(given: str | None) -> str:
    """The question from the command line or from stdin.

    Raises:
        PromptError: there is none, or it is not text.
    """
    # where the shell closed stdin, Python has none
    if given in (None, "-") and (sys.stdin is None or (given is None and sys.stdin.isatty())):
        raise PromptError("there is no question: give one as the argument, or pipe it into stdin")
    try:
        prompt = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
        prompt.encode()  # bytes that are no text reach Python as lone surrogates in some locales
    except UnicodeError as error:
        raise PromptError(f"the question is not text: {error}") from error
    if not prompt.strip():
        raise PromptError("the question is empty")
    return prompt


def _stream(engine: CocoaEngine, prompt: str, system: str | None, raw: bool, config: CocoaConfig) -> SpanStream:
    if raw:
        return engine.stream(prompt, config=config)
    if not engine.has_chat_template:
        raise ChatTemplateError(
            f"{engine.model_name} has no chat template: --raw lets it continue the prompt as it stands"
        )
    messages = [{"role": "system", "content": system}] if system is not None else []
    return engine.stream_chat([*messages, {"role": "user", "content": prompt}], config=config)


@contextmanager
def _screen(console: Console, *, draws: bool) -> Iterator[Callable[[Text], None]]:
    """Yields what draws the answer so far over the one before; nothing of it stays. Idle where none can be redrawn."""
    if not (draws and draws_on_screen(console)):
        yield lambda text: None
        return
    with Live(Text("…"), console=console, auto_refresh=False, transient=True) as live:

        def draw(text: Text) -> None:
            lines = text.wrap(console, console.width)[-(console.height - 1) :]  # an answer may outgrow the screen
            live.update(Text("\n").join(lines), refresh=True)

        yield draw


def _picture(shown: RenderableType, prompt: str) -> str:
    """An SVG picture of a terminal window that shows something. It names no web font, so opening it fetches nothing."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=PICTURE_WIDTH,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(shown)
    title = textwrap.shorten(f"cocoa ask {shlex.quote(prompt)}", PICTURE_WIDTH - 10, placeholder=" …")
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
