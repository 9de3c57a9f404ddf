"""A griffe extension for mkdocstrings: shows descriptions of pydantic fields, and turns Sphinx roles into links."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`(~?)([\w.]+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_LITERAL_BLOCK = re.compile(r"::\n\n(?= {4})")


class Docstrings(griffe.Extension):  # type: ignore[misc]  # untyped where griffe is not installed
    """Rewrites all docstrings of a package when it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstrings of every object of the package."""
        self._visit(pkg)

    def _visit(self, parent: griffe.Object) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Alias):
                continue
            if isinstance(member, griffe.Attribute):
                described = _field_description(member)
                if member.docstring is None and described:
                    member.docstring = griffe.Docstring(described, parent=member)
            if member.docstring is not None:
                member.docstring.value = _as_markdown(member.docstring.value, member)
            self._visit(member)


def _field_description(attribute: griffe.Attribute) -> str | None:
    """The description of a pydantic field, ``name: type = Field(default, description="...")``; its value is set."""
    try:
        call = ast.parse(str(attribute.value), mode="eval").body
    except SyntaxError:
        return None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Field"):
        return None
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    default = call.args[0] if call.args else given.get("default", given.get("default_factory"))
    attribute.value = None if default is None or ast.unparse(default) == "..." else ast.unparse(default)
    description = given.get("description")
    return str(description.value) if isinstance(description, ast.Constant) else None  # another is not known here


def _as_markdown(text: str, owner: griffe.Object) -> str:
    """A docstring as Markdown: roles become links, and literal blocks become indented code blocks."""
    text = _LITERAL_BLOCK.sub(":\n\n", _EXAMPLE.sub("Examples:", text))
    return _ROLE.sub(lambda role: _link(role[2], owner, short=bool(role[1])), text)


def _link(target: str, owner: griffe.Object, *, short: bool) -> str:
    shown = target.rsplit(".", 1)[-1] if short else target
    path = target
    if not target.startswith(("cocoa_engine.", "cocoa_integrations.")):
        try:
            path = owner.resolve(target)
        except griffe.NameResolutionError:
            return f"`{shown}`"
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
