"""cocoa chat: a conversation in the terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console
from rich.text import Text

from cocoa_engine.cli.ask import decode_live
from cocoa_engine.cli.info import load_engine
from cocoa_engine.cli.options import Calibrator, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.output import Terminated, can_redraw, describe_error, output, print_note
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.prompting import System, read_source
from cocoa_engine.config import CocoaConfig, MethodName
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError, unknown
from cocoa_engine.rendering.highlights import MOST_SHADED, RiskScale
from cocoa_engine.rendering.terminal import answer_text, check_list, spans_text
from cocoa_engine.rendering.wording import NOT_CALIBRATED, count, verdict
from cocoa_engine.risk import Check, MeasuredText
from cocoa_engine.safe_text import safe
from cocoa_engine.spans import Span

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


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
            raise PromptError(f"the questions are not text: {error}") from error
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
