"""``cocoa info``: facts about a model and how it runs."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from cocoa_engine.cli.loading import load_engine
from cocoa_engine.cli.options import Json, LoadOptions, Model, NoColor, with_options
from cocoa_engine.cli.progress import Progress
from cocoa_engine.cli.terminal import output, print_json
from cocoa_engine.safe_text import safe


@with_options()
def info(
    loading: LoadOptions,
    model: Model = None,
    json: Json = False,
    no_color: NoColor = False,
) -> None:
    """Describe a model: its layers, its middle window, and how its branches run."""
    found = load_engine(model, loading, progress=Progress("info")).info()
    if json:
        print_json(found.model_dump_json())
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in found.model_dump().items():
        lacking = "none" if name == "native_obstacle" else "unknown"
        table.add_row(name.replace("_", " "), Text(lacking if value is None else _shown(value)))
    output(no_color).print(table)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return "..".join(str(part) for part in value)
    return f"{value:,}" if isinstance(value, int) else safe(str(value))
