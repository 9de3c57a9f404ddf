"""Options that several commands share, those of the settings and of plug-ins, and the question of a command."""

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from rich.markup import escape
from typer.main import get_command

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import ChatTemplateError, CocoaError, ConfigError, DataError, PromptError
from cocoa_engine.lab.files import read_document
from cocoa_engine.model import load_options
from cocoa_engine.model.load_options import default_of

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
            self.question.encode()  # in some locales, bytes of an argument become lone surrogates
        except UnicodeError as error:
            raise PromptError("the question is not text: convert it to UTF-8 (iconv)") from error
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


GROUP, RUNNERS = "cocoa.commands", "cocoa.runners"
"""The groups of entry points for commands of other packages, and for running a command elsewhere, as on a cluster."""

BUILT_IN = {"ask": "ask", "chat": "ask", "compare": "ask", "score": "score", "info": "info", "bench": "info"}
BUILT_IN |= {"heads": "studies", "signal": "studies", "calibrate": "calibrate", "threshold": "studies"}
"""The commands of this package, each with its module. The function has the name of the command."""

Runner = Annotated[Callable[..., Any] | None, "runner"]  # of a command's parameter for what runs it elsewhere


@cache
def commands() -> dict[str, EntryPoint]:
    """The commands by name: the built-in ones, then those of other packages. Nothing is imported."""
    own = {name: EntryPoint(name, f"cocoa_engine.cli.{module}:{name}", GROUP) for name, module in BUILT_IN.items()}
    return own | {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in own}


@cache
def load_command(name: str) -> Any:
    """The Typer command of an entry point. If it cannot be imported, running the command reports the reason."""
    entry = commands()[name]
    try:
        function = entry.load()
    except Exception as error:
        reason = f"the command {name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"

        def function() -> None:
            raise CocoaError(reason)

        function.__doc__ = "(cannot be loaded)"
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, cls=getattr(function, "command_class", None))(function)
    return get_command(single)


def runner_options(command: str) -> Callable[..., Runner] | None:
    """The function with the options of what may run a command elsewhere, if there is one. It returns the runner, or
    `None` to run the command here."""
    for entry in entry_points(group=RUNNERS, name=command):
        with suppress(ImportError):
            options: Callable[..., Runner] = entry.load()
            return options
    return None


DECODING = "Decoding settings"
LOADING = "Model loading"

OTHER_METHODS = ("dola_layers", "dola_relative_top", "decore_heads", "decore_masked_heads", "diver_weight")
"""The settings of the other papers' decoding methods."""

_DECLARED = load_options.LoadOptions.model_fields

Model = Annotated[str | None, typer.Option(help=_DECLARED["model_name"].description)]
NoColor = Annotated[
    bool,
    typer.Option(
        "--no-color",
        help=escape("Write the risk into the text instead of colouring it: [like this|2]. NO_COLOR=1 does the same."),
    ),
]
Calibrator = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A calibrator written by cocoa calibrate. 'embedded': the embedded model's, which is used for that model "
        "by default. 'none': no calibrator.",
    ),
]
Details = Annotated[
    bool,
    typer.Option(
        "--details/--no-details",
        help="Also show the risk of every span and sentence, and every candidate of every risk point.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")]


def file_option(help: str, *flags: str, **options: Any) -> Any:
    return typer.Option(*flags, metavar="FILE", dir_okay=False, help=help, **options)


def _loading(name: str, *flags: str, help: str | None = None, **options: Any) -> Any:
    """An option for loading a model. Its help is that of the declared one, if it is not given."""
    return typer.Option(*flags, help=help or _DECLARED[name].description, rich_help_panel=LOADING, **options)


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. The options of the engine are declared in :mod:`cocoa_engine.model.load_options`."""

    tokenizer: Annotated[str | None, _loading("tokenizer_name", metavar="NAME")] = None
    revision: Annotated[
        str | None,
        _loading("revision", help="Branch, tag or commit of a model on the Hub. Default: main.", metavar="NAME"),
    ] = None
    dtype: Annotated[str, _loading("dtype")] = default_of("dtype")
    device_map: Annotated[str, _loading("device_map")] = default_of("device_map")
    forward: Annotated[
        str,
        _loading(
            "forward",
            help="modules: always run Hugging Face's modules, even for models that the faster lean pass supports.",
            metavar="auto|modules",
        ),
    ] = "auto"
    weights: Annotated[
        str,
        _loading(
            "weights",
            help="float32: unpack a GGUF file, to four bytes for each weight. q8_0, q4_k: quantise a safetensors "
            "checkpoint while it is loaded, to about 8.5 and 4.5 bits for each weight. For a CPU; it changes answers.",
            metavar="stored|float32|q8_0|q4_k",
        ),
    ] = "stored"
    threads: Annotated[
        int | None, _loading("threads", help="Number of CPU threads. Default: torch's choice.", min=1, max=4096)
    ] = None
    allow_pickle: Annotated[bool, _loading("allow_pickle", "--allow-pickle")] = False
    trust_remote_code: Annotated[bool, _loading("trust_remote_code", "--trust-remote-code")] = False
    debug: Annotated[bool, _loading("debug", "--debug", help="Show tracebacks and the libraries' own messages.")] = (
        False
    )


def with_options(*only: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a command; its parameters may be annotated ``CocoaConfig``, ``Model``, ``Runner`` and with
    dataclasses, such as ``LoadOptions``.

    Settings and dataclasses become one option per field, and the function receives the object built from the options. A
    ``Model`` can be given as an option and as an argument. A ``Runner`` becomes the options of the plug-in that may run
    the command elsewhere.
    Decoding options are passed on as text, so that bad values raise :class:`~cocoa_engine.errors.ConfigError`.

    Args:
        *only: the settings that the command takes. Default: all.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        for parameter in _parameters(function):
            build: Callable[..., Any] | None = None
            own = [parameter]
            if parameter.annotation is CocoaConfig:
                build, own = _config, [_setting(name) for name in only or CocoaConfig.model_fields]
            elif parameter.annotation == Model:
                build, own = _model, _parameters(_model)
            elif parameter.annotation == Runner:
                build = runner_options(function.__name__)
                own = _parameters(build) if build else []
            elif hasattr(parameter.annotation, "__dataclass_fields__"):
                build, own = parameter.annotation, _parameters(parameter.annotation)
            parameters += own
            if build is not None:
                groups[parameter.name] = build, [option.name for option in own]

        def command(**options: Any) -> None:
            built = {
                name: build(**{option: options.pop(option) for option in names})
                for name, (build, names) in groups.items()
            }
            function(**options, **built)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]


def _model(
    positional_model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    model: Model = None,
) -> str | None:
    """The model, as an argument after the others of the command or as ``--model``."""
    if model is not None and positional_model not in (None, model):
        raise ConfigError(
            f"two models are given: --model {model} and the argument {positional_model!r}. Give one of them"
        )
    return positional_model if model is None else model


def _kind(name: str) -> Any:
    annotation = CocoaConfig.model_fields[name].annotation
    return get_args(annotation)[0] if type(None) in get_args(annotation) else annotation


def _setting(name: str) -> inspect.Parameter:
    """The option of a setting. Its default is "not given", since the config declares the default."""
    field, kind = CocoaConfig.model_fields[name], _kind(name)
    repeatable = ... in get_args(kind)
    default = "" if field.default in (None, ()) else f" [default: {field.default}]"
    if repeatable:
        metavar = "TEXT"
    elif get_origin(kind) is Literal:
        metavar = "|".join(get_args(kind))
    else:
        parts = get_args(kind) if get_origin(kind) is tuple else [kind]
        metavar = ",".join(part.__name__.upper() for part in parts)
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=escape(f"{field.description or ''}{default}{' Repeatable.' if repeatable else ''}".strip()),
        metavar=metavar,
        show_default=False,
        rich_help_panel=DECODING,
    )
    annotation: Any = Annotated[(list[str] if repeatable else str) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config(**options: Any) -> CocoaConfig:
    """The settings from the given options, which are still text; the config validates them."""
    settings = {name: value for name, value in options.items() if value not in (None, [])}
    for name, value in settings.items():
        if isinstance(value, str) and get_origin(_kind(name)) is tuple:
            settings[name] = re.split(r",|(?<=\d)-", value)  # the evaluation harness writes tuples as 10-20
    return CocoaConfig(**settings)
