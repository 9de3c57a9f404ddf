"""Rules that the tests themselves keep, read off their syntax trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent

WAITS = {"acquire", "communicate", "join", "result", "wait"}
"""Methods that wait indefinitely if they are called without an argument."""


class Function(NamedTuple):
    """A function or method, and the names of what it calls: ``raises`` for ``pytest.raises(...)``."""

    name: str
    asserts: bool
    calls: set[str]


class File(NamedTuple):
    """What the rules ask of a file."""

    name: str
    is_test: bool
    imports: list[str]
    calls: list[ast.Call]
    functions: list[Function]


def called(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def runs_a_process(call: ast.Call) -> bool:
    """``subprocess.run``."""
    return called(call) == "run" and getattr(getattr(call.func, "value", None), "id", "") == "subprocess"


def has(call: ast.Call, keyword: str) -> bool:
    """Whether a keyword is given, and not as ``False``."""
    return any(key.arg == keyword and getattr(key.value, "value", True) is not False for key in call.keywords)


def read(path: Path) -> File:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imports = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imports += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    functions = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = list(ast.walk(node))
            calls = [each for each in inside if isinstance(each, ast.Call)]
            asserts = any(isinstance(each, ast.Assert) for each in inside) or any(has(call, "check") for call in calls)
            functions.append(Function(node.name, asserts, {called(call) for call in calls}))
    every_call = [node for node in nodes if isinstance(node, ast.Call)]
    return File(str(path.relative_to(TESTS)), path.name.startswith("test_"), imports, every_call, functions)


@cache
def files() -> list[File]:
    return [read(path) for path in sorted(TESTS.rglob("*.py"))]


def asserting(functions: list[Function]) -> set[str]:
    """Those that can fail by what they find: they assert, or call one that does."""
    found = {"raises", "warns", "fail", "assert_close"} | {each.name for each in functions if each.asserts}
    while more := {each.name for each in functions if each.name not in found and each.calls & found}:
        found |= more
    return found


def test_each_test_asserts_something() -> None:
    shared = [function for file in files() if not file.is_test for function in file.functions]
    idle = []
    for file in files():
        found = asserting([*shared, *file.functions])
        tests = [each for each in file.functions if file.is_test and each.name.startswith("test_")]
        idle += [f"{file.name}: {each.name}" for each in tests if not (each.asserts or each.calls & found)]
    assert idle == []


def test_nothing_is_imported_from_a_test_module() -> None:
    """What two modules need is in ``tests.helpers``."""
    wrong = [
        f"{file.name}: {name}"
        for file in files()
        for name in file.imports
        if name.rpartition(".")[2].startswith(("test_", "conftest"))
    ]
    assert wrong == []


def test_nothing_waits_without_a_limit() -> None:
    endless = [
        f"{file.name}:{call.lineno}: {ast.unparse(call)}"
        for file in files()
        for call in file.calls
        if (isinstance(call.func, ast.Attribute) and called(call) in WAITS and not (call.args or call.keywords))
        or (runs_a_process(call) and not has(call, "timeout"))
    ]
    assert endless == []
