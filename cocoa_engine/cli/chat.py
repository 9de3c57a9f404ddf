"""cocoa chat: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError
from cocoa_engine.messages import unknown
from cocoa_engine.rendering.highlights import MOST_SHADED, RiskScale
from cocoa_engine.rendering.terminal import answer_text, check_list, spans_text
from cocoa_engine.rendering.wording import NOT_CALIBRATED, count, verdict
from cocoa_engine.risk import Check, MeasuredText
from cocoa_engine.safe_text import safe
from cocoa_engine.spans import Span

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine


class Conversation:
    """Several questions to one engine. Each prompt holds the turns before it.

    The settings of the next answer, ``config``, may be replaced. Where a person types, Ctrl-C ends the answer only.
    """

    def __init__(
        self, engine: CocoaEngine, config: CocoaConfig, system: str | None, console: Console, *, interactive: bool
    ) -> None:
        self.config = config
        self._engine, self._system, self._console, self._keeps = engine, system, console, interactive
        self._draws, self._marks = interactive and can_redraw(console), console.color_system is None
        self._warned = False  # that the risk is not calibrated, which is said once
        self.reset()

    def reset(self) -> None:
        """Forget the turns and the passages."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._passages: list[str] = []  # of the turns so far
        self.added: list[str] = []
        """The passages to put before the next question. The attention of answers to them is measured."""
        self.checks: list[Check] | None = None
        """The claims of the last answer to check, riskiest first; `None` before the first answer."""

    def ask(self, question: str) -> None:
        """Answer a question and show the verdict and the answer. A question that fails is not kept.

        That the risk is not calibrated is said with the first answer only.
        """
        messages = [*self._messages, {"role": "user", "content": "\n\n".join([*self.added, question])}]
        passages = [*self._passages, *self.added]
        spans: list[Span] = []
        try:
            with self._engine.stream_chat(messages, config=self.config, source=passages or None) as stream:
                progress = Progress("chat")
                answer = decode_live(stream, self._console, spans, self._live, draws=self._draws, progress=progress)
        except KeyboardInterrupt as error:
            if not self._keeps or isinstance(error, Terminated):
                raise
            if not spans:
                self._show("Stopped before the first span. The question is not kept.")
                return
            text = "".join(span.text for span in spans)
            self._show(f"Stopped after {count(len(spans), 'span')}.", lambda: self._live(spans))
            self.checks = MeasuredText(text, spans, has_source=bool(passages)).check_these(MOST_SHADED)
        else:
            text = answer.text
            said = verdict(answer)
            said = said.removesuffix(NOT_CALIBRATED).rstrip() if self._warned else said
            self._warned = self._warned or NOT_CALIBRATED in said
            self._show(said, lambda: answer_text(answer, marks=self._marks))
            self.checks = answer.check_these(MOST_SHADED)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._passages, self.added = passages, []

    def _live(self, spans: Sequence[Span]) -> Text:
        return spans_text(spans, scale=RiskScale.of(spans), marks=self._marks)

    def _show(self, verdict: str, answer: Callable[[], Text] | None = None) -> None:
        lines: list[Text] = [] if answer is None else [Text(), answer()]
        parts = [Text(verdict, style="bold"), *lines, Text()]
        self._console.print(*parts, sep="\n", soft_wrap=not self._console.is_terminal)


PROMPT = "> "

COMMANDS = {
    "/method": "/method NAME     answer with another decoding method",
    "/why": "/why             where the last answer may be wrong, and why",
    "/source": "/source FILE     put the text of a file before the next question; without FILE, take it back",
    "/reset": "/reset           forget the questions, the answers and the files",
    "/help": "/help            this list",
    "/quit": "/quit            end the chat, as Ctrl-D does",
}


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
    for line in _typed(console) if interactive else _piped():
        try:
            if _ends(conversation, console, line):
                return
        except Exception as error:
            if not interactive or loading.debug:
                raise
            print_note(describe_error(error)[0])


def _typed(console: Console) -> Iterator[str]:
    """The lines that a person types. Ctrl-C clears a line."""
    while True:
        try:
            line = input(PROMPT if console.is_terminal else "")
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


def _piped() -> Iterator[str]:
    """The lines of stdin."""
    try:
        yield from sys.stdin or ()
    except UnicodeError as error:
        raise PromptError(f"the questions are not text: {error}") from error


def _ends(conversation: Conversation, console: Console, line: str) -> bool:
    """Follow a command or answer a question, and return whether the chat ends."""
    if not line.startswith("/"):
        if line.strip():
            conversation.ask(line.strip())
        return False
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise ConfigError(f"{unknown([name], COMMANDS, what='command')}. A question may begin with a space")
    if name == "/quit":
        return True
    reply = _followed(conversation, name, argument.strip())
    shown = reply if isinstance(reply, Text) else Text(reply, style="dim")
    console.print(shown, "", sep="\n", soft_wrap=not console.is_terminal)
    return False


def _followed(conversation: Conversation, name: str, argument: str) -> Text | str:
    """Follow a command, and return what it says."""
    if name == "/method":
        if argument:
            conversation.config = conversation.config.replace(method=argument)
        others = [method for method in get_args(MethodName) if method != conversation.config.method]
        return f"Method: {conversation.config.method}. Others: {', '.join(others)}."
    if name == "/why":
        return "There is no answer yet." if conversation.checks is None else check_list(conversation.checks)
    if name == "/source":
        if not argument:
            dropped, conversation.added = len(conversation.added), []
            return f"{count(dropped, 'file')} taken back."
        text = read_source(Path(argument).expanduser())
        conversation.added.append(text)
        return f"The next question begins with {safe(argument)} ({len(text):,} characters)."
    if name == "/reset":
        conversation.reset()
        return "A new chat."
    return "\n".join(COMMANDS.values())
