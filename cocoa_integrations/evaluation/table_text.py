"""Tables of results as Markdown, and on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from cocoa_engine.cli.output import output
from cocoa_engine.safe_text import safe


class Cell(NamedTuple):
    """The text of a cell, and whether it is emphasised."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """A table. The first ``left`` columns are texts, the others are numbers.

    Attributes:
        caption: a line above the table, if any.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str | None = None
    left: int = 2


@dataclass(frozen=True)
class Report:
    """A title, tables and notes."""

    name: str
    description: str
    tables: Sequence[Table]
    notes: list[str] = field(default_factory=list)


def markdown(report: Report) -> str:
    """The report as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"**{_cell(report.name)}**, {_cell(report.description)}"
    for table in report.tables:
        if table.caption:
            yield from ("", _cell(table.caption))
        yield ""
        yield _row(table.headings)
        yield _row(["---"] * table.left + ["---:"] * (len(table.headings) - table.left))
        for row in table.rows:
            yield _row([f"**{cell.text}**" if cell.bold else cell.text for cell in row])
    yield ""
    yield from map(safe, report.notes)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """A text in one line, which neither ends a cell nor begins HTML."""
    return " ".join(safe(text).split()).replace("|", "\\|").replace("<", "\\<")


def _shown(text: str, style: str = "") -> Text:
    return Text(safe(text), style)


def show(report: Report, *, as_markdown: bool = False) -> None:
    """Print a report on stdout: drawn on a terminal, otherwise, or if asked for, as Markdown."""
    console = output(no_color=False)
    if as_markdown or not sys.stdout.isatty():
        print(markdown(report), end="")
    else:
        draw(report, console)


_UNLIMITED = 10_000


def draw(report: Report, console: Console) -> None:
    """Draw a report on a console, with nothing cut off. Emphasised cells also have an asterisk, for output without
    colour."""
    parts: list[RenderableType] = [Text.assemble((safe(report.name), "bold"), f", {safe(report.description)}")]
    for table in report.tables:
        drawn = RichTable(title=_shown(table.caption) if table.caption else None, title_justify="left", title_style="")
        for number, heading in enumerate(table.headings):
            justify: Literal["left", "right"] = "left" if number < table.left else "right"
            drawn.add_column(_shown(heading), justify=justify, overflow="fold")
        for row in table.rows:
            drawn.add_row(*(_shown(f"{cell.text}*", "bold green") if cell.bold else _shown(cell.text) for cell in row))
        unlimited = console.options.update_width(_UNLIMITED)
        if console.measure(drawn, options=unlimited).minimum > console.width:  # words would be cut
            drawn.padding = 0
        parts.append(drawn)
    console.print(Group(*parts, *map(_shown, report.notes)))
