"""The adapters use public names of the engine and of each other only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cocoa_integrations

FOLDER = Path(cocoa_integrations.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))

FRAMEWORK_ATTRIBUTES = {
    "_asdict",  # of named tuples, public by their documentation
    "_fields",
    "_replace",
    "_convert_input",  # LangChain: from a prompt of any type to a prompt value
    "_get_prompt_modules",  # LlamaIndex: the synthesizer of a query engine
    "_output_cls",  # LlamaIndex: of a synthesizer
    "_streaming",
    "_getframe",  # sys
    "_exit",  # os
}
"""Underscore attributes of other packages that have no public equivalent."""

ENGINE_MODULES = {
    "cocoa_engine",
    "cocoa_engine.errors",
    "cocoa_engine.report",  # what every adapter reads and writes
    "cocoa_engine.integration",
    # the server, Ray and the evaluation only; a contract of imports keeps the adapters from these
    "cocoa_engine.arguments",  # settings are checked as the engine's are
    "cocoa_engine.cli.info",  # the commands `cocoa eval` and `cocoa judge` are plugins of the CLI
    "cocoa_engine.cli.options",
    "cocoa_engine.cli.output",
    "cocoa_engine.cli.score",  # which actors of Ray score too
    "cocoa_engine.confined",  # a request has one budget
    "cocoa_engine.equations",
    "cocoa_engine.lab.files",
    "cocoa_engine.lab.statistics",  # `cocoa eval` is a study too
    "cocoa_engine.rendering.terminal",
    "cocoa_engine.memory",
    "cocoa_engine.model.light_model",  # imports of transformers' model classes
    "cocoa_engine.model.load_options",
    "cocoa_engine.files",
    "cocoa_engine.rendering.documents",  # the server's page looks like the document
    "cocoa_engine.rendering.highlights",
    "cocoa_engine.rendering.wording",  # and says the same
    "cocoa_engine.text_matching",
}
"""The modules of the engine that integrations import."""


def own_names(tree: ast.AST) -> set[str]:
    """The names that a module defines: functions, classes, variables, and attributes set or declared by its classes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.expr) -> bool:
    """Whether an expression is ``self``, ``cls`` or ``super(...)``, or ``model``, a copy of a model."""
    if isinstance(node, ast.Call):
        node = node.func
        return isinstance(node, ast.Name) and node.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "model")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_private_attributes(source: str) -> Iterator[str]:
    """Underscore attributes that a module reads from objects of other modules."""
    tree = ast.parse(source)
    own = own_names(tree) | FRAMEWORK_ATTRIBUTES
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            if node.attr not in own:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                if is_private(name.name) and name.name != "_shared":
                    yield f"line {node.lineno}: import {name.name}"


def engine_imports(source: str) -> Iterator[tuple[str, str]]:
    """The modules of the engine that a module imports from, and the imported names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cocoa_engine":
            yield from ((str(node.module), name.name) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, "") for name in node.names if name.name.partition(".")[0] == "cocoa_engine")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_adapters_use_public_names_of_other_modules_and_of_the_engine(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert list(foreign_private_attributes(source)) == []
    imports = list(engine_imports(source))
    assert [(module, name) for module, name in imports if module not in ENGINE_MODULES or is_private(name)] == []


def test_the_list_of_modules_is_no_longer_than_needed() -> None:
    sources = [path.read_text(encoding="utf-8") for path in MODULES]
    assert {module for source in sources for module, _ in engine_imports(source)} >= ENGINE_MODULES
