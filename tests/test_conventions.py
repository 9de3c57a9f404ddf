"""Rules that the tests themselves keep, read off their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

WAITS = {"acquire", "communicate", "join", "result", "wait"}
"""Methods that wait indefinitely if they are called without an argument."""

Function = tuple[str, bool, set[str]]
"""The name of a function or method, whether it asserts, and what it calls: ``raises`` for ``pytest.raises(...)``."""


def called(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def has(call: ast.Call, keyword: str) -> bool:
    """Whether a keyword is given, and not as ``False``."""
    return any(key.arg == keyword and getattr(key.value, "value", True) is not False for key in call.keywords)


@cache
def files() -> dict[str, list[ast.AST]]:
    """The nodes of every file, by its name."""
    paths = sorted(TESTS.rglob("*.py"))
    return {str(path.relative_to(TESTS)): list(ast.walk(ast.parse(path.read_text("utf-8")))) for path in paths}


def functions_of(nodes: Iterable[ast.AST]) -> list[Function]:
    functions = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = list(ast.walk(node))
            calls = [each for each in inside if isinstance(each, ast.Call)]
            asserts = any(isinstance(each, ast.Assert) for each in inside) or any(has(call, "check") for call in calls)
            functions.append((node.name, asserts, {called(call) for call in calls}))
    return functions


def asserting(functions: list[Function]) -> set[str]:
    """Those that can fail by what they find: they assert, or call one that does."""
    names = {"raises", "warns", "fail", "assert_close"} | {name for name, asserts, _ in functions if asserts}
    while more := {name for name, _, calls in functions if name not in names and calls & names}:
        names |= more
    return names


def is_test(file: str) -> bool:
    return Path(file).name.startswith("test_")


def test_each_test_asserts_something() -> None:
    shared = [each for file, nodes in files().items() if not is_test(file) for each in functions_of(nodes)]
    idle = []
    for file in filter(is_test, files()):
        own = functions_of(files()[file])
        names = asserting([*shared, *own])
        idle += [f"{file}: {name}" for name, asserts, calls in own if not (asserts or calls & names) and is_test(name)]
    assert idle == []


def test_nothing_is_imported_from_a_test_module() -> None:
    """What two modules need is in ``tests.helpers``."""
    wrong = []
    for file, nodes in files().items():
        imports = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        imports += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
        wrong += [f"{file}: {name}" for name in imports if name.rpartition(".")[2].startswith(("test_", "conftest"))]
    assert wrong == []


def test_nothing_waits_without_a_limit() -> None:
    endless = []
    for file, nodes in files().items():
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            owner = getattr(getattr(call.func, "value", None), "id", "")
            waits = isinstance(call.func, ast.Attribute) and called(call) in WAITS and not (call.args or call.keywords)
            runs = (owner, called(call)) == ("subprocess", "run") and not has(call, "timeout")
            if waits or runs:
                endless.append(f"{file}:{call.lineno}: {ast.unparse(call)}")
    assert endless == []
