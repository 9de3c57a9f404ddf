"""Documents every command, argument and option of ``cocoa`` from its Typer app, including commands of plugins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.text import Text
from typer.main import get_command

from cocoa_engine.cli.app import app
from docs._generate.markdown import anchor, code, prose, table

_OPTIONS = "Options"


def commands() -> dict[str, Any]:
    """The commands by name, as Typer's command objects."""
    group: Any = get_command(app)
    context = group.context_class(group, info_name="cocoa")
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    broken = [name for name, command in found.items() if (command.help or "").startswith("(cannot be loaded)")]
    assert not broken, f"these commands cannot be imported: {broken}"
    return found


def parameters(command: Any) -> list[Any]:
    """A command's arguments and options, without hidden ones."""
    return [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]


def command_line() -> str:
    """One Markdown section per command: its usage, its help, and a table for each group of options."""
    parts = []
    for name, command in commands().items():
        arguments = [parameter for parameter in parameters(command) if parameter.param_type_name == "argument"]
        usage = " ".join(["cocoa", name, *(_usage(argument) for argument in arguments), "[OPTIONS]"])
        parts.append(f"## {code(f'cocoa {name}')} {{#{anchor('cocoa', name)}}}\n")
        parts.append(f"```text\n{usage}\n```\n")
        parts.append(prose(_plain(command.help)) + "\n")
        if arguments:
            parts.append(table(["Argument", "Meaning"], [[_usage_code(one), _meaning(one)] for one in arguments]))
        for panel, options in _panels(command).items():
            if panel != _OPTIONS:
                parts.append(f"**{panel}**\n")
            parts.append(table(["Option", "Default", "Meaning"], [_row(option) for option in options]))
    return "\n".join(parts)


def _panels(command: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = defaultdict(list)
    for parameter in parameters(command):
        if parameter.param_type_name == "option":
            panels[getattr(parameter, "rich_help_panel", None) or _OPTIONS].append(parameter)
    return dict(sorted(panels.items(), key=lambda panel: panel[0] != _OPTIONS))


def _usage(argument: Any) -> str:
    name = (argument.metavar or argument.name).strip("[]").upper()
    several = "..." if argument.nargs == -1 else ""
    return f"{name}{several}" if argument.required else f"[{name}]{several}"


def _usage_code(argument: Any) -> str:
    return code(_usage(argument).strip("[]"))


def _row(option: Any) -> list[str]:
    names = [*option.opts[:-1], " ".join([option.opts[-1], _value(option)]).strip(), *option.secondary_opts]
    return ["<br>".join(map(code, names)), _default(option), _meaning(option)]


def _value(option: Any) -> str:
    if option.is_flag:
        return ""
    if option.metavar:
        return str(option.metavar)
    descriptor = getattr(option, "type_descriptor", None)  # recent Typer; earlier versions have click's types
    kind = option.type if descriptor is None else descriptor.annotation
    return str(getattr(kind, "__name__", getattr(kind, "name", "text"))).upper().replace("STR", "TEXT")


def _default(option: Any) -> str:
    help_text = option.help or ""
    if "[default: " in _plain(help_text):  # a decoding setting names its default in its help
        return code(_plain(help_text).rpartition("[default: ")[2].partition("]")[0])
    default = option.default
    if option.required:
        return "required"
    if default is None or default is False or default in ("", (), []) or not option.show_default:
        return ""
    if isinstance(default, Iterable) and not isinstance(default, (str, Path)):
        default = ",".join(map(str, default))
    return code(str(default))


def _meaning(parameter: Any) -> str:
    text, default, rest = _plain(getattr(parameter, "help", None)).partition(" [default: ")
    return prose(text + rest.partition("]")[2] if default else text)


def _plain(help_text: str | None) -> str:
    """A help text without Rich markup."""
    return Text.from_markup(help_text or "").plain.replace("\b", "")
