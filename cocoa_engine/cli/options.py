"""Options that several commands share, those of the settings and of plug-ins."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape
from typer.main import get_command

from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CocoaError, ConfigError
from cocoa_engine.model import load_options
from cocoa_engine.model.load_options import default_of

GROUP = "cocoa.commands"

RUNNERS = "cocoa.runners"
"""The group of entry points for running a command elsewhere, as on a cluster. Each is named after the function of its
command."""

Runner = Annotated[Callable[..., Any] | None, "runner"]
"""The annotation of a command's parameter for what runs it elsewhere."""


@cache
def plugin_commands() -> dict[str, EntryPoint]:
    """The entry points of plugins by command name. Nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@cache
def load_command(name: str) -> Any:
    """The Typer command of an entry point. If it cannot be imported, running the command reports the reason."""
    entry = plugin_commands()[name]
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
    """The function whose parameters are the options of what may run a command elsewhere; `None` if there is none.

    It returns what runs the command; `None` to run it here.
    """
    for entry in entry_points(group=RUNNERS):
        if entry.name == command:
            with suppress(ImportError):
                options: Callable[..., Runner] = entry.load()
                return options
    return None


DECODING = "Decoding settings"
LOADING = "Model loading"

OTHER_METHODS = ("dola_layers", "dola_relative_top", "decore_heads", "decore_masked_heads", "diver_weight")
"""The settings of the other papers' decoding methods."""

_DECLARED = load_options.LoadOptions.model_fields

MODEL_HELP = _DECLARED["model_name"].description

Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
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


def _declared(name: str, *flags: str, metavar: str | None = None) -> Any:
    """The option of the command line for a declared loading option."""
    return typer.Option(*flags, metavar=metavar, help=_DECLARED[name].description, rich_help_panel=LOADING)


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. The options of the engine are declared in :mod:`cocoa_engine.model.load_options`."""

    tokenizer: Annotated[str | None, _declared("tokenizer_name", metavar="NAME")] = None
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Branch, tag or commit of a model on the Hub. Default: main.", rich_help_panel=LOADING
        ),
    ] = None
    dtype: Annotated[str, _declared("dtype")] = default_of("dtype")
    device_map: Annotated[str, _declared("device_map")] = default_of("device_map")
    forward: Annotated[
        str,
        typer.Option(
            metavar="auto|modules",
            help="modules: always run Hugging Face's modules, even for models that the faster lean pass supports.",
            rich_help_panel=LOADING,
        ),
    ] = "auto"
    weights: Annotated[
        str,
        typer.Option(
            metavar="stored|float32|q8_0|q4_k",
            help="float32: unpack a GGUF file, to four bytes for each weight. q8_0, q4_k: quantise a safetensors "
            "checkpoint while it is loaded, to about 8.5 and 4.5 bits for each weight. For a CPU; it changes answers.",
            rich_help_panel=LOADING,
        ),
    ] = "stored"
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Number of CPU threads. Default: torch's choice.", rich_help_panel=LOADING),
    ] = None
    allow_pickle: Annotated[bool, _declared("allow_pickle", "--allow-pickle")] = default_of("allow_pickle")
    trust_remote_code: Annotated[bool, _declared("trust_remote_code", "--trust-remote-code")] = default_of(
        "trust_remote_code"
    )
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.", rich_help_panel=LOADING)
    ] = False


def with_options(*only: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a command; its parameters may be annotated ``CocoaConfig``, ``LoadOptions``, ``Model``
    and ``Runner``.

    Each of the first two becomes one option per field, and the function receives the object built from the options. A
    ``Model`` can be given as an option and as an argument. A parameter ``runner: Runner`` becomes the options of the
    plug-in that may run the command elsewhere.
    Decoding options are passed on as text, so that bad values raise :class:`~cocoa_engine.errors.ConfigError`.

    Args:
        *only: the settings that the command takes. Default: all.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        elsewhere: Callable[..., Runner] | None = None
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.annotation is CocoaConfig:
                parameters += _config_options(only)
            elif parameter.annotation is LoadOptions:
                parameters += _load_options()
            elif parameter.annotation == Runner:
                elsewhere = runner_options(function.__name__)
                parameters += [] if elsewhere is None else _runner_options(elsewhere)
            elif parameter.annotation == Model:
                parameters += _model_options()
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def command(**given: Any) -> None:
            loading = {field.name: given.pop(field.name) for field in fields(LoadOptions)}
            # only these fields, since a command may define an option with the name of another field
            config = {name: given.pop(name) for name in _fields(only) if name in given}
            for name, kind in get_type_hints(function).items():
                if kind is CocoaConfig:
                    given[name] = _config(config)
                elif kind is LoadOptions:
                    given[name] = LoadOptions(**loading)
            if elsewhere is not None:
                given["runner"] = elsewhere(
                    **{
                        runner_option.name: given.pop(runner_option.name)
                        for runner_option in _runner_options(elsewhere)
                    }
                )
            if "positional_model" in given:
                given["model"] = _one_model(given["model"], given.pop("positional_model"))
            function(**given)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _runner_options(elsewhere: Callable[..., Runner]) -> list[inspect.Parameter]:
    parameters = inspect.signature(elsewhere, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]


def _load_options() -> Iterator[inspect.Parameter]:
    types = get_type_hints(LoadOptions, include_extras=True)
    for field in fields(LoadOptions):
        yield _option(field.name, types[field.name], field.default)


def _model_options() -> Iterator[inspect.Parameter]:
    """The model as ``--model`` and as an argument after the others of the command."""
    argument = typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    yield _option("positional_model", Annotated[str | None, argument], None)
    yield _option("model", Model, None)


def _one_model(option: str | None, argument: str | None) -> str | None:
    """The model that was given in either way.

    Raises:
        ConfigError: two different models were given.
    """
    if option is not None and argument not in (None, option):
        raise ConfigError(f"two models are given: --model {option} and the argument {argument!r}. Give one of them")
    return argument if option is None else option


def _fields(only: Sequence[str]) -> list[str]:
    return [name for name in CocoaConfig.model_fields if not only or name in only]


def _config_options(only: Sequence[str]) -> Iterator[inspect.Parameter]:
    """One option per setting. The option's default is "not given", since the config declares the default."""
    for name in _fields(only):
        field = CocoaConfig.model_fields[name]
        repeatable = _is_repeatable(field)
        default = "" if field.default in (None, ()) else f" [default: {field.default}]"
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=escape(f"{field.description}{default}{' Repeatable.' if repeatable else ''}"),
            metavar=_metavar(field),
            show_default=False,
            rich_help_panel=DECODING,
        )
        yield _option(name, Annotated[(list[str] if repeatable else str) | None, option], None)


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _config(given: Mapping[str, Any]) -> CocoaConfig:
    """The settings from the given options, which are still text; the config validates them."""
    settings = {name: value for name, value in given.items() if value not in (None, [])}
    for name, value in settings.items():
        if isinstance(value, str) and _is_tuple(CocoaConfig.model_fields[name]):
            settings[name] = re.split(r",|(?<=\d)-", value)  # the evaluation harness writes tuples as 10-20
    return CocoaConfig(**settings)


def _alternatives(field: FieldInfo) -> tuple[Any, ...]:
    """The types of a field: the members of its union, or its only type."""
    return get_args(field.annotation) if type(None) in get_args(field.annotation) else (field.annotation,)


def _is_tuple(field: FieldInfo) -> bool:
    return any(get_origin(kind) is tuple for kind in _alternatives(field))


def _is_repeatable(field: FieldInfo) -> bool:
    return any(get_origin(kind) is tuple and ... in get_args(kind) for kind in _alternatives(field))


def _metavar(field: FieldInfo) -> str:
    """The placeholder of an option's value in the help: its choices, or its type."""
    kind = _alternatives(field)[0]
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if _is_repeatable(field):
        return "TEXT"
    if get_origin(kind) is tuple:
        return ",".join(part.__name__.upper() for part in get_args(kind))
    return str(kind.__name__).upper()
