"""The question that a command puts to a model, and how it is put."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine, SpanStream

Question = Annotated[
    str | None, typer.Argument(help="The question. None or -: it is read from stdin.", show_default=False)
]
System = Annotated[str | None, typer.Option(help="A system message that precedes the question.")]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt as it stands, without the model's chat template.")
]


def read_question(given: str | None, *, system: str | None, raw: bool) -> str:
    """The question from the command line or from stdin.

    Raises:
        ConfigError: a system message is given where no chat is.
        PromptError: there is no question, or it is not text.
    """
    if raw and system is not None:
        raise ConfigError("--system is part of a chat and --raw asks without one: leave out one of the two")
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


def put(engine: CocoaEngine, prompt: str, system: str | None, raw: bool, config: CocoaConfig) -> SpanStream:
    """The stream of the answer's spans.

    Raises:
        ChatTemplateError: the model cannot chat.
    """
    if raw:
        return engine.stream(prompt, config=config)
    if not engine.has_chat_template:
        raise ChatTemplateError(
            f"{engine.model_name} has no chat template: --raw lets it continue the prompt as it stands"
        )
    messages = [{"role": "system", "content": system}] if system is not None else []
    return engine.stream_chat([*messages, {"role": "user", "content": prompt}], config=config)
