"""``cocoa serve``: serve a model with OpenAI's protocol. Registered as an entry point of ``cocoa``."""

import os
from dataclasses import asdict, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cocoa_engine import CocoaConfig, Runtime
from cocoa_engine.cli.info import declared_options, load_engine
from cocoa_engine.cli.options import Calibrator, LoadOptions, Model, Runner, with_options
from cocoa_engine.cli.output import Progress, print_note
from cocoa_engine.errors import CocoaError, ConfigError
from cocoa_engine.integration import MODEL_NAME, need
from cocoa_integrations.server.settings import ServerSettings

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

KEYS_VARIABLE = "COCOA_API_KEYS"

SERVER, ACCESS, LIMITS = "Server", "Access", "Limits"


def _option(name: str, kind: Any, panel: str, text: str, default: Any = None, *flags: str, **options: Any) -> Any:
    return name, Annotated[kind, typer.Option(*flags, help=text, rich_help_panel=panel, **options)], default


def _setting(name: str, panel: str, *flags: str, option: str | None = None, metavar: str | None = None) -> Any:
    """The option for a field of :class:`ServerSettings`, which validates it: its name, its type and its default."""
    field = ServerSettings.model_fields[name]
    bounds = {key: value for entry in field.metadata for key, value in asdict(entry).items()}
    text = escape(field.description or "")
    if option is not None:
        return _option(option, list[str] | None, panel, f"{text} Repeatable.", metavar=metavar)
    limits = {"min": bounds.get("ge"), "max": bounds.get("le")}
    return _option(name, field.annotation, panel, text, field.default, *flags, metavar=metavar, **limits)


ServerOptions = make_dataclass(
    "ServerOptions",
    [
        _setting("host", SERVER),
        _setting("port", SERVER),
        _setting("served_names", SERVER, option="served_model_name", metavar="NAME"),
        _setting("write_timeout", SERVER, metavar="SECONDS"),
        _setting("shutdown_timeout", SERVER, metavar="SECONDS"),
        _setting("log_prompts", SERVER, "--log-prompts"),
        _setting("risk_in_logprobs", SERVER),
        _option(
            "api_key",
            list[str] | None,
            ACCESS,
            "Key that clients must send. Repeatable. Other users of the machine see it in the list of processes; "
            f"prefer a file or the environment variable {KEYS_VARIABLE}.",
            metavar="KEY",
        ),
        _option("api_key_file", Path | None, ACCESS, "File with keys, one a line.", metavar="FILE"),
        _setting("allow_no_key", ACCESS, "--allow-no-key"),
        _setting("allowed_hosts", ACCESS, option="allowed_host", metavar="NAME"),
        _option(
            "max_batch_size",
            int,
            LIMITS,
            "Maximum number of answers that are decoded together.",
            Runtime.model_fields["max_batch_size"].default,
            min=1,
            max=4096,
        ),
        _option(
            "max_queue",
            int | None,
            LIMITS,
            "Maximum number of answers that wait. More get status 429. Default: "
            f"{Runtime.model_fields['max_queue'].default}; with --ray as many, for each replica, as are decoded "
            "together.",
            min=0,
            max=10**6,
            show_default=False,
        ),
        _setting("max_n", LIMITS),
        _setting("max_answer_tokens", LIMITS),
        _setting("max_body_bytes", LIMITS),
    ],
)
"""The options of a server, from which :func:`serve` makes its settings."""


@with_options()
def serve(
    config: CocoaConfig,
    loading: LoadOptions,
    model: Model = None,
    calibrator: Calibrator = None,
    *,
    server: ServerOptions,  # type: ignore[valid-type]
    runner: Runner = None,
) -> None:
    """Serve a model with OpenAI's protocol: any OpenAI client gets its answers, and the risk of every span.

    The decoding settings are the defaults of requests, which can change them.
    """
    need("uvicorn", extra="serve", what="cocoa serve")
    from cocoa_integrations.server.process import keep_one_arena

    keep_one_arena()  # before there are threads
    from cocoa_integrations.server.app import create_app
    from cocoa_integrations.server.errors import unhandled_logged
    from cocoa_integrations.server.process import DrainingServer, listening

    options = {name: value for name, value in vars(server).items() if value is not None}
    keys = tuple(given_keys(options.pop("api_key", ()), options.pop("api_key_file", None)))
    runtime = {name: options.pop(name) for name in ("max_batch_size", "max_queue") if name in options}
    for option, name in (("served_model_name", "served_names"), ("allowed_host", "allowed_hosts")):
        options[name] = tuple(options.pop(option, ())) or ServerSettings.model_fields[name].default
    settings = ServerSettings(api_keys=keys, **options)
    if runner is not None:
        runner(declared_options(model, loading, calibrator, **runtime), config, settings, threads=loading.threads)
        return

    def load() -> "CocoaEngine":
        engine = load_engine(model, loading, calibrator, progress=Progress("serve"), **runtime)
        engine.config = config
        return engine

    app = create_app(load, settings)
    try:
        with unhandled_logged(app.state.cocoa.shows_texts):
            # a taken port is found before the model is loaded
            DrainingServer(app, ends_process=True).run(sockets=[listening(settings)])
    finally:
        if app.state.cocoa.loads:
            print_note("stopped before the model was loaded")
            os._exit(0)  # the thread that loads cannot be stopped, and Python must not end around it
    if (error := app.state.cocoa.error) is not None:
        raise error if isinstance(error, CocoaError) else CocoaError(f"{model or MODEL_NAME}: {error}")


def given_keys(keys: list[str] | tuple[str, ...], file: Path | None) -> list[str]:
    """The API keys from the options, a file and the environment.

    The file has one key a line; empty lines, and lines that begin with ``#``, are left out.
    """
    accepted = [*keys, *os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()]
    if file is None:
        return accepted
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from None
    if not (of_file := [line for line in lines if line and not line.startswith("#")]):
        raise ConfigError(f"--api-key-file {file} has no key; write one a line")
    return accepted + of_file
