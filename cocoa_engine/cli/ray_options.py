"""The options of commands that can share their work among the actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from cocoa_engine.cli.plugins import ray_runner
from cocoa_engine.errors import ConfigError

PANEL = "Ray"

Ray = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Share the work among the actors of a Ray cluster: that of RAY_ADDRESS, the one of this machine, or a new "
        "one. An interrupted run is resumed by the same command.",
        rich_help_panel=PANEL,
    ),
]
Actors = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10_000,
        help="Largest number of actors; each loads the model. Default: 2.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
NumCpus = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=10_000, help="CPU cores of each. Default: 1.", show_default=False, rich_help_panel=PANEL
    ),
]
NumGpus = Annotated[
    float | None,
    typer.Option(min=0, max=10_000, help="GPUs of each. Default: none.", show_default=False, rich_help_panel=PANEL),
]


def runner_of(command: str, ray: bool, **options: Any) -> Callable[..., Any] | None:
    """What runs a command on a Ray cluster; `None` without ``--ray``.

    Args:
        command: the name of the command.
        ray: whether ``--ray`` is given.
        **options: the options that need it.

    Raises:
        ConfigError: such an option is given without ``--ray``.
        MissingExtraError: Ray is not installed.
    """
    if not ray:
        for name, value in options.items():
            if value is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --ray")
        return None
    runner: Callable[..., Any] = ray_runner(command)
    return runner
