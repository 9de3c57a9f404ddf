"""The question of a command."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, ConfigError, DataError, PromptError
from cocoa_engine.lab.files import read_document

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine, SpanStream

Sources = Annotated[
    list[Path] | None,
    typer.Option(
        "--source",
        metavar="FILE",
        help="Put the text of a file before the prompt, as a passage to answer from, and measure how much the answer "
        "attends to it. Repeatable.",
        show_default=False,
    ),
]
System = Annotated[str | None, typer.Option(help="A system message before the question.")]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt as plain text, without the model's chat template.")
]


@dataclass
class Request:
    """What a command asks the engine: its options, the question and the texts of the files of ``--source``."""

    prompt: Annotated[
        str | None,
        typer.Argument(help="The question. Without it, or with -, it is read from stdin.", show_default=False),
    ] = None
    system: System = None
    source: Sources = None
    raw: Raw = False
    question: str = field(init=False)
    sources: list[str] = field(init=False)

    def __post_init__(self) -> None:
        require_chat(self.system, raw=self.raw)
        piped = self.prompt in (None, "-")
        # sys.stdin is None if the shell closed it
        if piped and (sys.stdin is None or (self.prompt is None and sys.stdin.isatty())):
            raise PromptError("there is no question: give one as the argument, or pipe it into stdin")
        try:
            self.question = sys.stdin.read().removesuffix("\n") if piped else str(self.prompt)
            self.question.encode()  # in some locales, bytes that are not text become lone surrogates
        except UnicodeError as error:
            raise PromptError(f"the question is not text: {error}") from error
        if not self.question.strip():
            raise PromptError("the question is empty")
        self.sources = [read_source(file) for file in self.source or ()]

    def ask(self, engine: "CocoaEngine", config: CocoaConfig) -> "SpanStream":
        from cocoa_engine.model.prompts import chat_of

        prompt, source = "\n\n".join([*self.sources, self.question]), self.sources or None
        if self.raw:
            return engine.stream(prompt, config=config, source=source)
        if not engine.has_chat_template:
            raise ChatTemplateError(
                f"{engine.model_name} has no chat template: use --raw to continue the prompt as plain text"
            )
        return engine.stream_chat(chat_of(prompt, self.system), config=config, source=source)


def require_chat(system: str | None, *, raw: bool) -> None:
    if raw and system is not None:
        raise ConfigError("--system needs the chat template, which --raw does not use: give only one of them")


def read_source(file: Path) -> str:
    if not (text := read_document(file).strip()):
        raise DataError(f"{file} is empty")
    return text
