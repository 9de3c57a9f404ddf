"""The modules of the standard library that a source imports, without running it."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator

# they do something when they are imported, such as opening a browser or installing packages
_ACTING = frozenset(("antigravity", "idlelib", "test", "this", "tkinter", "turtle", "turtledemo"))


def standard_modules(sources: Iterable[str]) -> list[str]:
    """The names of the modules, in order, each once. A source that is not Python has none."""
    found: dict[str, None] = {}
    for source in sources:
        for name in _imported(source):
            first, *rest = name.split(".")
            acts = first in _ACTING or any(part.startswith("__") for part in (first, *rest) if part != "__future__")
            if first in sys.stdlib_module_names and not acts:
                found[name] = None
    return list(found)


def _imported(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # it may be a module of a package
