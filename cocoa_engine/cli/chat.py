"""``cocoa chat``: several questions in a terminal, with the answers coloured by risk while they grow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.text import Text

from cocoa_engine.cli.conversation import Conversation
from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Calibrator, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.prompting import System, read_source
from cocoa_engine.cli.terminal import Terminated, can_redraw, describe_error, output, print_note
from cocoa_engine.config import CocoaConfig, MethodName
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError
from cocoa_engine.messages import unknown
from cocoa_engine.rendering.terminal import check_list
from cocoa_engine.rendering.wording import count
from cocoa_engine.safe_text import safe

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
    draws = interactive and can_redraw(console)
    conversation = Conversation(engine, config, system, console, draws=draws, keeps=interactive)
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
    """The lines of stdin.

    Raises:
        PromptError: they are not text.
    """
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
    if said := _FOLLOWED[name](conversation, argument.strip()):
        shown = said if isinstance(said, Text) else Text(said, style="dim")
        console.print(shown, "", sep="\n", soft_wrap=not console.is_terminal)
    return False


def _method(conversation: Conversation, name: str) -> str:
    if name:
        conversation.config = conversation.config.replace(method=name)
    others = [one for one in get_args(MethodName) if one != conversation.config.method]
    return f"Method: {conversation.config.method}. Others: {', '.join(others)}."


def _why(conversation: Conversation, _: str) -> Text | str:
    return "There is no answer yet." if conversation.checks is None else check_list(conversation.checks)


def _source(conversation: Conversation, name: str) -> str:
    if not name:
        return f"{count(conversation.drop_added(), 'file')} taken back."
    text = read_source(Path(name).expanduser())
    conversation.add_passage(text)
    return f"The next question begins with {safe(name)} ({len(text):,} characters)."


def _reset(conversation: Conversation, _: str) -> str:
    conversation.reset()
    return "A new chat."


def _help(_: Conversation, __: str) -> str:
    return "\n".join(COMMANDS.values())


_FOLLOWED: dict[str, Callable[[Conversation, str], Text | str]] = {
    "/method": _method,
    "/why": _why,
    "/source": _source,
    "/reset": _reset,
    "/help": _help,
}
