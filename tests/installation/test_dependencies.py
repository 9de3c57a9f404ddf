"""What is imported is declared, an optional import names its extra, and without a package nothing else fails."""

import ast
import logging
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cocoa_engine.errors import DISTRIBUTIONS, CocoaError, MissingExtraError, need
from cocoa_engine.memory import quiet_torchao
from tests.helpers.paths import PYPROJECT, ROOT, requirements
from tests.helpers.processes import run

OURS = ("cocoa_engine", "cocoa_integrations")
PROJECT = PYPROJECT["project"]

EXTRA_OF_FOLDER = {
    "cocoa_integrations/langchain/agents.py": "agents",
    "cocoa_integrations/langchain/": "langchain",
    "cocoa_integrations/llama_index/": "llama-index",
    "cocoa_integrations/evaluation/harness_task.py": "eval",  # `evaluate` asks for it before it is imported
    "cocoa_integrations/lm_eval/": "eval",
    "cocoa_integrations/server/": "serve",
    "cocoa_integrations/ray/": "ray",
}
"""What asks for its extra as a whole, before anything else; the first match counts."""

INDIRECT = {"accelerate"}  # transformers imports it for device_map

OF_TESTS = {"absl": "absl-py", "yaml": "pyyaml", "markdown-it": "markdown-it-py"}
"""The packages of modules of the tests, where the names differ."""

ELSEWHERE = {"ray", "llama-cpp", "litellm", "openai-harmony"}
"""What tests and benchmarks use only where it is installed, or in an environment of its own."""


class Import(NamedTuple):
    """One import of a module that is neither ours nor Python's."""

    file: str
    line: int
    package: str
    at_top: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.package}"


def _package(module: str) -> str:
    top = module.partition(".")[0]
    return canonicalize_name(DISTRIBUTIONS.get(module) or DISTRIBUTIONS.get(top, top))


@cache
def _texts(*folders: str) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def _trees() -> list[tuple[str, ast.Module]]:
    return [(file, ast.parse(text)) for file, text in _texts(*OURS).items()]


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement, and whether it runs when its module is imported; what only type checkers read is left out."""
    left: list[tuple[ast.AST, bool]] = [(tree, True)]
    while left:
        node, at_top = left.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            left += [(child, at_top) for child in node.orelse]
            continue
        yield node, at_top
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        inner = at_top and not inside
        left += [(child, inner) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


@cache
def _imports() -> list[Import]:
    return [
        Import(file, getattr(node, "lineno", 0), _package(module), at_top)
        for file, tree in _trees()
        for node, at_top in _nodes(tree)
        for module in _modules(node)
        if module.partition(".")[0] not in (*sys.stdlib_module_names, *OURS)
    ]


@cache
def _needs() -> list[tuple[str, str, str]]:
    """Of each call of ``need``, the place, the package and the extra."""
    return [
        (f"{file}:{node.lineno}", _package(ast.literal_eval(node.args[0])), ast.literal_eval(keyword.value))
        for file, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "need"
        for keyword in node.keywords
        if keyword.arg == "extra"
    ]


def _requirements(lines: list[str]) -> dict[str, Requirement]:
    """Requirements by package."""
    return {canonicalize_name(one.name): one for one in requirements(lines)}


BASE = _requirements(PROJECT["dependencies"])
EXTRAS = {extra: _requirements(lines) for extra, lines in PROJECT["optional-dependencies"].items()}


@pytest.mark.slow
def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    declared = {*BASE, *EXTRAS["all"], *EXTRAS["ray"]}
    assert [str(one) for one in _imports() if one.package not in declared] == []
    assert declared - {one.package for one in _imports()} - {package for _, package, _ in _needs()} == INDIRECT
    declared = {*BASE, *EXTRAS["dev"], *ELSEWHERE}
    text = "\n".join(_texts("tests", "benchmarks").values())
    modules = {*re.findall(r"^ *(?:from (?=\S+ import )|import )(\w+)", text, re.MULTILINE)} - {
        *sys.stdlib_module_names
    }
    packages = {_package(module) for module in modules - {*OURS, "tests", "benchmarks", "docs"}}
    assert {"pytest", "httpx", "markdown-it"} <= packages
    assert {OF_TESTS.get(package, package) for package in packages} - declared == set()


def test_modules_and_needs_ask_for_an_extra_that_brings_what_they_import() -> None:
    undeclared = []
    for one in _imports():
        extra = next((extra for part, extra in EXTRA_OF_FOLDER.items() if one.file.startswith(part)), None)
        if one.at_top and one.package not in {*BASE, *(EXTRAS[extra] if extra else ())}:
            undeclared.append(str(one))
    assert undeclared == []
    assert [place for place, package, extra in _needs() if package not in EXTRAS[extra]] == []


def test_all_is_every_extra_for_users_but_ray_which_is_large() -> None:
    assert set(EXTRAS["all"]) == {
        package for extra, ones in EXTRAS.items() if extra not in ("dev", "docs", "ray") for package in ones
    }
    assert "ray" not in EXTRAS["dev"]


def _pins(file: str) -> dict[str, str]:
    pins = re.findall(r"^([\w.-]+)==([\w.]+)(?:;.*)?$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): pinned for name, pinned in pins}


def test_pinned_versions_are_within_the_ranges() -> None:
    pins = _pins("constraints.txt")
    ranges = {**BASE, **EXTRAS["dev"], **EXTRAS["ray"]}
    assert {
        name: pinned for name, pinned in pins.items() if name in ranges and pinned not in ranges[name].specifier
    } == {}
    assert {*BASE, *EXTRAS["all"]} - {*pins} == set()


def test_floors_are_the_lowest_versions_of_the_ranges() -> None:
    floors = _pins("constraints-floors.txt")
    lowest = {
        name: bound.version
        for name, one in {**BASE, **EXTRAS["all"]}.items()
        for bound in one.specifier
        if bound.operator == ">="
    }
    floors.pop("torch")  # older ones are not tested: the file says why
    lowest.pop("torch")
    assert {name: Requirement(f"{name}=={pinned}").specifier for name, pinned in floors.items()} == {
        name: Requirement(f"{name}=={low}").specifier for name, low in lowest.items()
    }


# --- with all packages, of which an adapter imports its own only, and without some

PROGRAM = """
import atexit, gc, sys
gc.disable()  # nothing is done here but imports
atexit.register(gc.freeze)  # nor at the end
from importlib.abc import MetaPathFinder

frameworks = {"langchain_core", "langchain", "langgraph", "openai", "llama_index"}
missing = set()

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def without(*names):
    for name in [name for name in sys.modules if name.partition(".")[0] in {*frameworks, "cocoa_integrations"}]:
        del sys.modules[name]
    missing.clear()
    missing.update(names)

def loaded(*names):
    return {name for name in sys.modules if name.partition(".")[0] in names}

import cocoa_engine.engine
assert not loaded(*frameworks), loaded(*frameworks)
import llama_index.core
from transformers import GenerationMixin
before = set(sys.modules)  # older versions import OpenTelemetry themselves
import cocoa_integrations.llama_index
foreign = {*loaded("langchain", "langchain_core", "opentelemetry"), "cocoa_integrations.langchain"}
assert not foreign & (set(sys.modules) - before), foreign

without()
import cocoa_integrations.langchain
assert all(hasattr(cocoa_integrations.langchain, name) for name in cocoa_integrations.langchain.__all__)
optional = ("llama_index", "langchain", "langgraph")
assert not loaded(*optional), loaded(*optional)
assert cocoa_integrations.langchain.RiskMiddleware.__module__ == "cocoa_integrations.langchain.agents"
assert loaded("langchain")

sys.meta_path.insert(0, Missing())
without(*frameworks, "lm_eval")  # neither framework
import cocoa_integrations.evaluation.command
import cocoa_integrations.evaluation.judge
import cocoa_integrations.tool_calling
import cocoa_integrations.tracing
import cocoa_integrations.transformers
from cocoa_engine import CocoaEngine
from cocoa_engine.errors import MissingExtraError

def refused(load, user, package, extra):
    try:
        load()
    except MissingExtraError as error:
        assert str(error) == f"{user} needs {package}: pip install 'cocoa-integrations[{extra}]'", error
    else:
        raise AssertionError(user)

for module, package, extra in (
    ("langchain", "langchain-core", "langchain"),
    ("llama_index", "llama-index-core", "llama-index"),
    ("lm_eval", "lm-eval", "eval"),
):
    name = f"cocoa_integrations.{module}"
    refused(lambda: __import__(name), name, package, extra)
command = cocoa_integrations.evaluation.command
refused(lambda: command.chat_model("openai:gpt"), "cocoa judge", "langchain", "agents")

without(*frameworks - {"langchain_core"})  # only langchain_core
import cocoa_integrations.server
from cocoa_integrations.langchain import ChatCocoa

agents = "cocoa_integrations.langchain.agents"
refused(lambda: __import__(agents), agents, "langchain", "agents")

without(*frameworks - {"llama_index"})  # only llama_index
from cocoa_integrations.llama_index import CocoaLLM
"""


@pytest.mark.slow
def test_with_and_without_packages() -> None:
    """Nothing prints anything, be it torchao, which transformers imports where it is installed."""
    done = run([sys.executable, "-c", PROGRAM])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_error_names_the_distribution_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(
        MissingExtraError, match=r"^fitting needs scikit-learn: pip install 'cocoa-integrations\[risk\]'$"
    ) as caught:
        need("sklearn.linear_model", extra="risk", what="fitting")
    assert isinstance(caught.value, CocoaError)
    assert isinstance(caught.value, ImportError)
    assert need("json.decoder", extra="risk", what="nothing").JSONDecoder


def test_a_package_that_lacks_something_itself_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cocoa_made_up.py").write_text("import cocoa_made_up_too")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="cocoa_made_up_too") as caught:
        need("cocoa_made_up", extra="risk", what="nothing")
    assert not isinstance(caught.value, MissingExtraError)


def test_only_what_torchao_says_at_its_import_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("torchao", "cocoa_engine"):
        logging.getLogger(name).warning("before")
        with quiet_torchao():
            logging.getLogger(name).warning("while")
        logging.getLogger(name).warning("after")
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert said == [
        ("torchao", "before"),
        ("torchao", "after"),
        ("cocoa_engine", "before"),
        ("cocoa_engine", "while"),
        ("cocoa_engine", "after"),
    ]
