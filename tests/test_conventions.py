"""Rules that the tests themselves keep, read off their syntax trees."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from cocoa_engine.lab import files as lab_files

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


def asserting(functions: list[Function], others: Iterable[str]) -> set[str]:
    """Those that can fail by what they find: they assert, or call one that does, which may be one of others."""
    names = {name for name, asserts, _ in functions if asserts}.union(others)
    while more := {name for name, _, calls in functions if name not in names and calls & names}:
        names |= more
    return names


def is_test(file: str) -> bool:
    return Path(file).name.startswith("test_")


@pytest.mark.slow
def test_each_test_asserts_something() -> None:
    shared = [each for file, nodes in files().items() if not is_test(file) for each in functions_of(nodes)]
    names = asserting(shared, ("raises", "warns", "fail", "assert_close", "assert_allclose", "wait_until"))
    idle = []
    for file in filter(is_test, files()):
        own = functions_of(files()[file])
        own_names = asserting(own, names)
        idle += [
            f"{file}: {name}" for name, asserts, calls in own if not (asserts or calls & own_names) and is_test(name)
        ]
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


READ_WITH = {
    *(name for name in vars(lab_files) if name.startswith("read_")),
    *("read_text", "read_bytes", "read_note", "read_records", "read_lines", "read_table", "model_validate_json"),
    *("GGUFReader", "ParquetFile", "safe_open", "load_file", "cached_file", "get_config_dict", "from_pretrained"),
    *("memmap", "fromfile", "open", "fdopen"),
}
"""Functions that read a file, wherever they come from."""
LOADERS = {"json", "np", "numpy", "pickle", "torch", "tomllib", "yaml"}
"""Modules whose ``load`` reads one."""
NO_READERS = {"CocoaEngine", "Embedding", "backend"}
"""What loads or opens what another module reads, or nothing that is a file."""

ENGINE = """
arguments cli/options cli/score execution/native/build files lab/cache lab/data
lab/files lab/stopping methods/retrieval_heads model/checkpoint_files model/configs model/gguf_model model/gguf_reader
model/gguf_tokenizer model/loading model/quantised_weights model/weight_identity risk/calibrator
"""
INTEGRATIONS = """
evaluation/files evaluation/harness evaluation/judge evaluation/tasks ray/jobs server/command
"""
"""The modules that tests/adversarial give broken files to."""

WITHOUT = {
    "cocoa_engine/cli/app.py": "/dev/null, which it writes to",
    "cocoa_engine/confined.py": "files of /proc and /dev",
    "cocoa_engine/execution/backends/unshared.py": "its own place for keys and values, which it opens",
    "cocoa_engine/rendering/documents.py": "a file of the package",
    "cocoa_engine/lab/heads.py": "a file of the package",
    "cocoa_engine/lab/self_made.py": "a file of the package",
    "cocoa_engine/risk/policy.py": "a file of the package",
    "cocoa_engine/lab/timing.py": "/proc/cpuinfo",
    "cocoa_integrations/chat_service/local.py": "a stream of the engine, which it opens",
    "cocoa_integrations/llama_index/llm.py": "a stream of the engine, which it opens",
    "cocoa_integrations/evaluation/command.py": "only the digest of the bytes",
    "cocoa_integrations/evaluation/table.py": "a file of the package",
    "cocoa_integrations/server/routes/page.py": "files of the package",
}


def names_of(node: ast.expr) -> tuple[str, str]:
    if isinstance(node, ast.Attribute):
        return node.attr, names_of(node.value)[0]
    return (node.id, "") if isinstance(node, ast.Name) else ("", "")


def reads(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    name, owner = names_of(node)
    return owner not in NO_READERS and (name in READ_WITH or (name == "load" and owner in LOADERS))


@pytest.mark.slow
def test_every_module_that_reads_files_is_given_broken_ones() -> None:
    root = TESTS.parent
    found = {
        path.relative_to(root).as_posix()
        for package in ("cocoa_engine", "cocoa_integrations")
        for path in (root / package).rglob("*.py")
        if any(map(reads, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    given = {f"cocoa_engine/{module}.py" for module in ENGINE.split()}
    given |= {f"cocoa_integrations/{module}.py" for module in INTEGRATIONS.split()}
    assert found == given | WITHOUT.keys(), "add a test with broken files, or say why there is none"
