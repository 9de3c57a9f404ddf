"""Commands that other packages plug into ``cocoa``: entry points of the group ``cocoa.commands``.

An entry point names a function made like those here, with Typer's annotations. It is imported when its command is asked
for (or listed by ``--help``), and one that cannot be imported fails by itself.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.main import get_command

from cocoa_engine.errors import CocoaError

GROUP = "cocoa.commands"


@cache
def plugged_commands() -> dict[str, EntryPoint]:
    """The entry points by the name of their command; nothing is imported yet."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@cache
def load_command(name: str) -> Any:
    """The command of an entry point, as Typer makes it. One that cannot be imported says so when it is run."""
    entry = plugged_commands()[name]
    try:
        function = entry.load()
    except Exception as error:
        reason = f"the command {name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"

        def function() -> None:
            raise CocoaError(reason)

        function.__doc__ = "(cannot be loaded)"
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name)(function)
    return get_command(single)
