"""Documents the exceptions of both packages, and the public functions whose docstrings list them under ``Raises:``."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import cocoa_engine.errors
from cocoa_engine.errors import CocoaError
from docs._generate.markdown import anchor, code, plain_roles

ROOT = Path(__file__).parents[2]

PACKAGES = (
    "cocoa_engine",
    "cocoa_engine.lab.data",
    "cocoa_integrations.langchain",
    "cocoa_integrations.llama_index",
    "cocoa_integrations.transformers",
    "cocoa_integrations.evaluation",
)
"""The packages whose public names are searched for ``Raises:``. They are parsed, since an import would load torch."""

_RAISES = re.compile(r"^Raises:\n((?:^ .*\n?|^\n)+)", re.MULTILINE)


def public_errors() -> list[type[CocoaError]]:
    """Every public exception class in the order of declaration, the base class first."""
    classes = vars(cocoa_engine.errors).values()
    return [one for one in classes if inspect.isclass(one) and issubclass(one, CocoaError)]


def error_classes() -> str:
    """One Markdown section for each exception class."""
    raised = _raised_by()
    parts = []
    for error in public_errors():
        name = error.__name__
        bases = ", ".join(code(base.__name__) for base in error.__bases__)
        parts.append(f"[](){{#cocoa_engine.errors.{name}}}\n")  # the anchor that docstrings and signatures link to
        parts.append(f"## {code(name)} {{#{anchor(name)}}}\n")
        parts.append(f"Bases: {bases}\n")
        parts.append(_with_attribute_list(plain_roles(inspect.getdoc(error) or "")) + "\n")
        if callers := raised[name]:
            parts.append("Raised by: " + ", ".join(map(_linked, sorted(callers))) + "\n")
    return "\n".join(parts)


def _linked(path: str) -> str:
    package = max((one for one in PACKAGES if path.startswith(f"{one}.")), key=len)
    shown = path.removeprefix(f"{package}.")
    framework = package.rpartition(".")[2]
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>' + (
        f" ({framework})" if package.startswith("cocoa_integrations.") else ""
    )


def _with_attribute_list(text: str) -> str:
    """A docstring's ``Attributes:`` as a list."""
    before, heading, attributes = text.partition("Attributes:\n")
    listed = re.sub(r"^ +(\w+): ", r"- `\1`: ", attributes, flags=re.MULTILINE)
    return f"{before}Attributes:\n\n{listed}" if heading else text


def _raised_by() -> dict[str, set[str]]:
    """The public functions, classes and methods whose docstring names an error under ``Raises:``."""
    raised: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        file = ROOT / package.replace(".", "/")
        modules = [file.with_suffix(".py")] if file.with_suffix(".py").exists() else sorted(file.rglob("*.py"))
        trees = [ast.parse(module.read_text(encoding="utf-8")) for module in modules]
        names = {
            name
            for module, tree in zip(modules, trees, strict=True)
            if _is_public_module(module, file)
            for name in _all(tree)
        }
        for tree in trees:
            for path, docstring in _docstrings(tree.body, names):
                for error in _raises(docstring):
                    raised[error].add(f"{package}.{path}")
    return raised


def _is_public_module(module: Path, package: Path) -> bool:
    return module in (package / "__init__.py", package.with_suffix(".py"))


def _all(tree: ast.Module) -> list[str]:
    """The names in a module's ``__all__``, and in its ``_LAZY``, which are imported on first use."""
    names: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in ("__all__", "_LAZY"):
            names += ast.literal_eval(statement.value)
    return names


def _docstrings(body: list[ast.stmt], names: set[str] | None, inside: str = "") -> Iterator[tuple[str, str]]:
    for statement in body:
        if not isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if statement.name.startswith("_") or (names is not None and statement.name not in names):
            continue
        yield inside + statement.name, ast.get_docstring(statement) or ""
        if isinstance(statement, ast.ClassDef):
            yield from _docstrings(statement.body, None, f"{inside}{statement.name}.")


def _raises(docstring: str) -> list[str]:
    section = _RAISES.search(docstring)
    return re.findall(r"^ {4}(\w+): ", section[1], re.MULTILINE) if section else []
