"""cocoa ask, cocoa compare and cocoa chat: answers with the risk of their parts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, islice
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.options import (
    Calibrator,
    Details,
    Json,
    LoadOptions,
    Model,
    NoColor,
    Request,
    System,
    read_source,
    with_options,
)
from cocoa_engine.cli.output import (
    Html,
    Progress,
    Svg,
    Terminated,
    can_redraw,
    check_writable,
    describe_error,
    live,
    output,
    print_json,
    print_note,
    write,
)
from cocoa_engine.config import CocoaConfig, MethodName
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError, safe, short_repr, unknown
from cocoa_engine.rendering.documents import render, svg_document
from cocoa_engine.rendering.highlights import MOST_SHADED, RiskScale
from cocoa_engine.rendering.terminal import answer_text, check_list, report, spans_text
from cocoa_engine.rendering.wording import NOT_CALIBRATED, count, verdict
from cocoa_engine.results import Generation
from cocoa_engine.risk import Check, MeasuredText
from cocoa_engine.spans import RAW, Span

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine, SpanStream


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
            help="Exit with code 3 if the risk of the answer as a whole is at least this. auto: the threshold of the "
            "answer's report.",
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
        least, risk = generation.answer_threshold if limit == "auto" else limit, generation.answer_risk
        if least is not None and risk is not None and not risk < least:
            print_note(f"the risk of the answer, {risk:.3f}, reaches --fail-on-risk {least:g}")
            raise typer.Exit(TOO_RISKY)


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


COMMANDS = {
    "/method": "/method NAME     answer with another decoding method",
    "/why": "/why             where the last answer may be wrong, and why",
    "/source": "/source FILE     put the text of a file before the next question; without FILE, take it back",
    "/reset": "/reset           forget the questions, the answers and the files",
    "/help": "/help            this list",
    "/quit": "/quit            end the chat, as Ctrl-D does",
}


class Conversation:
    """Several questions to one engine. Each prompt holds the turns before it.

    Where a person types, Ctrl-C ends the answer only.
    """

    def __init__(
        self, engine: "CocoaEngine", config: CocoaConfig, system: str | None, console: Console, *, interactive: bool
    ) -> None:
        self._engine, self._config, self._system, self._console = engine, config, system, console
        self._interactive, self._marks = interactive, console.color_system is None
        self._warned = False  # that the risk is not calibrated, which is said once
        self._reset()

    def _reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._passages: list[str] = []  # of the turns so far, whose attention is measured
        self._added: list[str] = []  # to put before the next question
        self._checks: list[Check] | None = None  # of the last answer

    def _ask(self, question: str) -> None:
        """Answer a question and show the verdict and the answer. A question that fails is not kept."""
        messages = [*self._messages, {"role": "user", "content": "\n\n".join([*self._added, question])}]
        passages = [*self._passages, *self._added]
        spans: list[Span] = []
        draws = self._interactive and can_redraw(self._console)
        try:
            with self._engine.stream_chat(messages, config=self._config, source=passages or None) as stream:
                progress = Progress("chat")
                answer = decode_live(stream, self._console, spans, self._live, draws=draws, progress=progress)
        except KeyboardInterrupt as error:
            if not self._interactive or isinstance(error, Terminated):
                raise
            if not spans:
                self._show(Text("Stopped before the first span. The question is not kept.", style="bold"))
                return
            text = "".join(span.text for span in spans)
            said, drawn = f"Stopped after {count(len(spans), 'span')}.", self._live(spans)
            self._checks = MeasuredText(text, spans, has_source=bool(passages)).check_these(MOST_SHADED)
        else:
            text, said, drawn = answer.text, verdict(answer), answer_text(answer, marks=self._marks)
            said = said.removesuffix(NOT_CALIBRATED).rstrip() if self._warned else said
            self._warned = self._warned or NOT_CALIBRATED in said
            self._checks = answer.check_these(MOST_SHADED)
        self._show(Text(said, style="bold"), Text(), drawn)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._passages, self._added = passages, []

    def _live(self, spans: Sequence[Span]) -> Text:
        return spans_text(spans, scale=RiskScale.of(spans), marks=self._marks)

    def _show(self, *parts: Text) -> None:
        self._console.print(*parts, Text(), sep="\n", soft_wrap=not self._console.is_terminal)

    def ends(self, line: str) -> bool:
        """Follow a command or answer a question, and return whether the chat ends."""
        if not line.startswith("/"):
            if line.strip():
                self._ask(line.strip())
            return False
        name, _, argument = line.strip().partition(" ")
        if name not in COMMANDS:
            raise ConfigError(f"{unknown([name], COMMANDS, what='command')}. A question may begin with a space")
        argument, reply = argument.strip(), "\n".join(COMMANDS.values())
        if name == "/why" and self._checks is not None:
            self._show(check_list(self._checks))
            return False
        if name == "/why":
            reply = "There is no answer yet."
        elif name == "/method":
            if argument:
                self._config = self._config.replace(method=argument)
            others = [method for method in get_args(MethodName) if method != self._config.method]
            reply = f"Method: {self._config.method}. Others: {', '.join(others)}."
        elif name == "/source" and argument:
            text = read_source(Path(argument).expanduser())
            self._added.append(text)
            reply = f"The next question begins with {safe(argument)} ({len(text):,} characters)."
        elif name == "/source":
            reply, self._added = f"{count(len(self._added), 'file')} taken back.", []
        elif name == "/reset":
            self._reset()
            reply = "A new chat."
        if name != "/quit":
            self._show(Text(reply, style="dim"))
        return name == "/quit"


@with_options()
def chat(
    config: CocoaConfig,
    loading: LoadOptions,
    model: Model = None,
    calibrator: Calibrator = None,
    system: System = None,
    no_color: NoColor = False,
) -> None:
    """Chat with a model. Answers are coloured by risk while they grow. A verdict and the riskiest claims follow.

    A line that begins with a slash is a command; /help lists them. Ctrl-C stops the answer and keeps the chat.

    Questions can also be piped into stdin, one a line. The output then has no colours, and the first error or Ctrl-C
    ends the chat.
    """
    interactive = sys.stdin is not None and sys.stdin.isatty()
    engine = load_engine(model, loading, calibrator, progress=Progress("chat"))
    if not engine.has_chat_template:
        raise ChatTemplateError(
            f"{engine.model_name} has no chat template, which a chat needs. `cocoa ask --raw` continues plain text"
        )
    console = output(no_color or not interactive)
    conversation = Conversation(engine, config, system, console, interactive=interactive)
    if interactive:
        with suppress(ImportError):
            import_module("readline")  # lines can then be edited
        console.print(Text(f"{engine.model_name}. /help lists the commands.", style="dim"))
    for line in _lines(console, interactive):
        try:
            if conversation.ends(line):
                return
        except Exception as error:
            if not interactive or loading.debug:
                raise
            print_note(describe_error(error)[0])


def _lines(console: Console, interactive: bool) -> Iterator[str]:
    """The lines of stdin. Where a person types them, Ctrl-C clears a line."""
    if not interactive:
        try:
            yield from sys.stdin or ()
        except UnicodeError as error:
            raise PromptError("the questions are not text: convert them to UTF-8 (iconv)") from error
    while interactive:
        try:
            line = input("> " if console.is_terminal else "")
        except EOFError:
            console.print()
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            console.print()
            print_note("Ctrl-D or /quit ends the chat")
            continue
        yield line
