"""Plugins: commands of other packages, found by entry points of the group ``cocoa.commands``.

An entry point names a function with Typer's annotations, like the commands of this package. It is imported only when
its command is run or listed by ``--help``. A plugin that cannot be imported does not affect other commands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.main import get_command

from cocoa_engine.errors import CocoaError

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
