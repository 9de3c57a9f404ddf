"""Helpers that write plain text and types as Markdown."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_CODE = re.compile(r"(`[^`]+`)")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?([^`]+)`")
_IDENTIFIER = re.compile(r"(?<![\w`/-])((?:\w+\.)*[A-Za-z]{2,}_\w+|--[a-z][\w-]*)(?![\w`/])")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(cell.split()) for cell in line) + " |" for line in lines) + "\n"


def code(text: str) -> str:
    """Inline code."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def prose(text: str) -> str:
    """A description, as Markdown that is safe in a table: identifiers become code, other markup is escaped."""
    pieces = _CODE.split(plain_roles(text))
    return "".join(piece if piece.startswith("`") else _escaped(piece) for piece in pieces)


def plain_roles(text: str) -> str:
    """A docstring's Sphinx roles and double backticks as inline code: ``:class:`~a.b.C``` is `C`."""
    text = _ROLE.sub(lambda role: f"`{_role_name(role[1], short='~' in role[0])}`", text)
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _role_name(target: str, *, short: bool) -> str:
    return target.rsplit(".", 1)[-1] if short else target


def _escaped(text: str) -> str:
    text = re.sub(r"([\\*|\[\]])", r"\\\1", text).replace("<", "&lt;")
    return _IDENTIFIER.sub(lambda found: f"`{found[1]}`", text)


def anchor(*words: str) -> str:
    """An HTML id made of the words, for a heading or a cell."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def type_name(kind: Any) -> str:
    """A type as it is written in an annotation."""
    if kind is None or kind is type(None):
        return "None"
    if kind is ...:
        return "..."
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments)).replace("'", '"')
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_name, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_name, arguments))}]"
    return str(kind.__name__)
