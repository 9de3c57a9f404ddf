"""Tables in Markdown, and how they are shown."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markdown import Markdown

from cocoa_engine.errors import safe


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = None) -> list[str]:
    """A table as lines of Markdown. The first ``left`` columns are texts, the others numbers; `None`: all are texts."""
    rules = ["---" if left is None or number < left else "---:" for number in range(len(headings))]
    return [f"| {' | '.join(map(inline, cells))} |" for cells in (headings, rules, *rows)]


def inline(text: str) -> str:
    """A text in one line, which neither ends a cell nor begins HTML."""
    return " ".join(safe(text).split()).replace("|", "\\|").replace("<", "\\<")


def show(text: str, console: Console, *, as_markdown: bool = False) -> None:
    """Print Markdown: drawn on a terminal that has colours and is wide enough for its tables, otherwise as it is."""
    widest = max((len(line) for line in text.splitlines() if line.startswith("|")), default=0)
    if as_markdown or not console.is_terminal or console.color_system is None or widest > console.width:
        console.print(text, end="", soft_wrap=True, markup=False, highlight=False)
    else:
        console.print(Markdown(text))
