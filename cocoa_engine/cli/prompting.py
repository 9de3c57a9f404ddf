"""Reading a command's question, and asking the engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, ConfigError, PromptError

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine, SpanStream

Question = Annotated[
    str | None, typer.Argument(help="The question. Without it, or with -, it is read from stdin.", show_default=False)
]
System = Annotated[str | None, typer.Option(help="A system message before the question.")]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt as plain text, without the model's chat template.")
]


def read_question(given: str | None, *, system: str | None, raw: bool) -> str:
    """The question from the command line or from stdin.

    Raises:
        ConfigError: a system message is combined with ``--raw``.
        PromptError: there is no question, or it is not text.
    """
    if raw and system is not None:
        raise ConfigError("--system needs the chat template, which --raw does not use: give only one of them")
    # sys.stdin is None if the shell closed it
    if given in (None, "-") and (sys.stdin is None or (given is None and sys.stdin.isatty())):
        raise PromptError("there is no question: give one as the argument, or pipe it into stdin")
    try:
        prompt = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
        prompt.encode()  # in some locales, bytes that are not text become lone surrogates
    except UnicodeError as error:
        raise PromptError(f"the question is not text: {error}") from error
    if not prompt.strip():
        raise PromptError("the question is empty")
    return prompt


def ask_engine(engine: CocoaEngine, prompt: str, system: str | None, raw: bool, config: CocoaConfig) -> SpanStream:
    """Start the decode and return the stream of spans.

    Raises:
        ChatTemplateError: the model has no chat template.
    """
    if raw:
        return engine.stream(prompt, config=config)
    if not engine.has_chat_template:
        raise ChatTemplateError(
            f"{engine.model_name} has no chat template: use --raw to continue the prompt as plain text"
        )
    messages = [{"role": "system", "content": system}] if system is not None else []
    return engine.stream_chat([*messages, {"role": "user", "content": prompt}], config=config)
