"""``cocoa serve``: serve a model with OpenAI's protocol. Registered as an entry point of ``cocoa``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cocoa_engine import Runtime
from cocoa_engine.cli.info import declared_options, load_engine
from cocoa_engine.cli.options import Calibrator, LoadOptions, Model, Runner, with_options
from cocoa_engine.cli.output import print_note
from cocoa_engine.cli.progress import Progress
from cocoa_engine.config import CocoaConfig
from cocoa_engine.errors import CocoaError, ConfigError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_engine.optional import need
from cocoa_integrations.server.settings import ServerSettings

if TYPE_CHECKING:
    from cocoa_engine import CocoaEngine

KEYS_VARIABLE = "COCOA_API_KEYS"

SERVER = "Server"
ACCESS = "Access"
LIMITS = "Limits"


def _setting(name: str, panel: str, *flags: str, metavar: str | None = None, more: str = "") -> Any:
    """The option of the command line for a field of :class:`ServerSettings`, which validates it."""
    field = ServerSettings.model_fields[name]
    bounds = {key: value for entry in field.metadata for key, value in asdict(entry).items()}
    return typer.Option(
        *flags,
        metavar=metavar,
        min=bounds.get("ge"),
        max=bounds.get("le"),
        help=escape(str(field.description)) + more,
        rich_help_panel=panel,
    )


_DEFAULT = ServerSettings()


@with_options()
def serve(
    config: CocoaConfig,
    loading: LoadOptions,
    model: Model = None,
    calibrator: Calibrator = None,
    host: Annotated[str, _setting("host", SERVER)] = _DEFAULT.host,
    port: Annotated[int, _setting("port", SERVER)] = _DEFAULT.port,
    served_model_name: Annotated[
        list[str] | None, _setting("served_names", SERVER, metavar="NAME", more=" Repeatable.")
    ] = None,
    write_timeout: Annotated[float, _setting("write_timeout", SERVER, metavar="SECONDS")] = _DEFAULT.write_timeout,
    shutdown_timeout: Annotated[
        float, _setting("shutdown_timeout", SERVER, metavar="SECONDS")
    ] = _DEFAULT.shutdown_timeout,
    log_prompts: Annotated[bool, _setting("log_prompts", SERVER, "--log-prompts")] = False,
    risk_in_logprobs: Annotated[bool, _setting("risk_in_logprobs", SERVER)] = _DEFAULT.risk_in_logprobs,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Key that clients must send. Repeatable. Other users of the machine see it in the list of processes; "
            f"prefer a file or the environment variable {KEYS_VARIABLE}.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with keys, one a line.", rich_help_panel=ACCESS)
    ] = None,
    allow_no_key: Annotated[bool, _setting("allow_no_key", ACCESS, "--allow-no-key")] = False,
    allowed_host: Annotated[
        list[str] | None, _setting("allowed_hosts", ACCESS, metavar="NAME", more=" Repeatable.")
    ] = None,
    max_batch_size: Annotated[
        int,
        typer.Option(
            min=1, max=4096, help="Maximum number of answers that are decoded together.", rich_help_panel=LIMITS
        ),
    ] = Runtime.model_fields["max_batch_size"].default,
    max_queue: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10**6,
            help="Maximum number of answers that wait. More get status 429. Default: "
            f"{Runtime.model_fields['max_queue'].default}; with --ray as many, for each replica, as are decoded "
            "together.",
            show_default=False,
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_n: Annotated[int, _setting("max_n", LIMITS)] = _DEFAULT.max_n,
    max_answer_tokens: Annotated[int, _setting("max_answer_tokens", LIMITS)] = _DEFAULT.max_answer_tokens,
    max_body_bytes: Annotated[int, _setting("max_body_bytes", LIMITS)] = _DEFAULT.max_body_bytes,
    runner: Runner = None,
) -> None:
    """Serve a model with OpenAI's protocol: any OpenAI client gets its answers, and the risk of every span.

    The decoding settings are the defaults of requests, which can change them.
    """
    need("uvicorn", extra="serve", what="cocoa serve")
    from cocoa_integrations.server.lifecycle import keep_one_arena

    keep_one_arena()  # before there are threads
    from cocoa_integrations.server.app import create_app
    from cocoa_integrations.server.errors import unhandled_logged
    from cocoa_integrations.server.process import DrainingServer, listening

    settings = ServerSettings(
        host=host,
        port=port,
        served_names=tuple(served_model_name or ()),
        write_timeout=write_timeout,
        shutdown_timeout=shutdown_timeout,
        log_prompts=log_prompts,
        risk_in_logprobs=risk_in_logprobs,
        api_keys=tuple(given_keys(api_key or (), api_key_file)),
        allow_no_key=allow_no_key,
        allowed_hosts=tuple(allowed_host) if allowed_host else None,
        max_n=max_n,
        max_answer_tokens=max_answer_tokens,
        max_body_bytes=max_body_bytes,
    )
    runtime = {"max_batch_size": max_batch_size, **({} if max_queue is None else {"max_queue": max_queue})}
    if runner is not None:
        declared = declared_options(model, loading, calibrator, **runtime)
        runner(declared, config, settings, threads=loading.threads)
        return

    def load() -> CocoaEngine:
        engine = load_engine(model, loading, calibrator, progress=Progress("serve"), **runtime)
        engine.config = config
        return engine

    app = create_app(load, settings)
    try:
        with unhandled_logged(app.state.cocoa.shows_texts):
            server = DrainingServer(app, ends_process=True)
            server.run(sockets=[listening(settings)])  # a taken port is found before the model is loaded
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
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file}: {error}") from None
        of_file = [line for line in lines if line and not line.startswith("#")]
        if not of_file:
            raise ConfigError(f"--api-key-file {file} has no key; write one a line")
        accepted += of_file
    return accepted
