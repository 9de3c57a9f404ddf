"""Plugins: commands of other packages, found by entry points of the group ``cocoa.commands``.

An entry point names a function with Typer's annotations, like the commands of this package. It is imported only when
its command is run or listed by ``--help``. A plugin that cannot be imported does not affect other commands.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.main import get_command

from cocoa_engine.errors import CocoaError, MissingExtraError

GROUP = "cocoa.commands"

RAY = "cocoa.ray"
"""The group of entry points that run a command on a Ray cluster. Each is named after its command."""


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


def ray_runner(command: str) -> Any:
    """The function that runs a command on a Ray cluster.

    Raises:
        MissingExtraError: no package provides one.
    """
    for entry in entry_points(group=RAY):
        if entry.name == command:
            return entry.load()
    raise MissingExtraError(f"cocoa {command} --ray needs ray: pip install 'cocoa-integrations[ray]'")
