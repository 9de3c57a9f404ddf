"""The code on the pages works: Python runs, commands and their options exist."""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cocoa_engine import CocoaEngine
from docs._generate.command_line import commands
from tests.helpers.pages import PAGES, ROOT, SHELLS, blocks, command_lines, name_of

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
WITH_COMMANDS = [page for page in PAGES if any(block.language in SHELLS for block in blocks(page))]
README = [block for block in blocks(ROOT / "README.md") if block.language == "python"]


def test_readme_has_a_short_example_for_each_way_in() -> None:
    for package in ("cocoa_engine", "cocoa_integrations.langchain", "cocoa_integrations.llama_index"):
        assert any(f"from {package} import" in block.code for block in README)
    assert all(len(block.code.strip().splitlines()) <= 12 for block in README)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_has_a_reason(page: Path) -> None:
    unexplained = [block.line for block in blocks(page) if block.reason is not None and len(block.reason.split()) < 2]
    assert unexplained == []


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_run(
    page: Path,
    engine: CocoaEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The blocks of a page run in order and share their names, in an empty folder that has the examples' files."""
    gc.collect()  # what an earlier page holds in cycles (agents) would share its engine
    load = CocoaEngine.from_pretrained

    def already_loaded(model_name: str | None = None, **options: Any) -> CocoaEngine:
        if model_name is not None:
            return load(model_name, **options)
        own = {name: options.get(name) for name in ("config", "runtime", "calibrator")}
        if not any(own.values()):
            return engine
        return CocoaEngine(engine.model, engine.tokenizer, model_name=engine.model_name, **own)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", already_loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    module = ModuleType("code_of_a_page")  # pydantic looks up annotations in a class's module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if block.language != "python" or block.reason is not None:
            continue
        # so that a traceback names the line on the page
        code = compile("\n" * (block.line - 1) + block.code, name_of(page), "exec")
        exec(code, vars(module))
        if re.search(r"^print\(", block.code, re.MULTILINE):
            assert capsys.readouterr().out.strip(), f"{name_of(page)}:{block.line} prints nothing"


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_exist(page: Path) -> None:
    wrong = {}
    for block in blocks(page):
        if block.language not in SHELLS:
            continue
        for words in command_lines(block):
            if (fault := _fault(words)) is not None:
                wrong[f"{name_of(page)}:{block.line}: {' '.join(words)}"] = fault
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        "cocoa ask hello --gama 1",
        "cocoa asc hello",
        "cocoa calibrate --model X --miss",
        "cocoa eval nq --out runs",
        "make everything",
        "pip install '.[riks]'",
        "python examples/none.py",
        "python -m benchmarks.none",
    ],
)
def test_wrong_commands_are_seen(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\nX=1 {line} > out.txt\n```\n", encoding="utf-8")
    ((words,),) = [list(command_lines(block)) for block in blocks(page)]
    assert _fault(words) is not None


def _fault(words: list[str]) -> str | None:
    """What is wrong with a command line; None where nothing is, or nothing is known of the program."""
    program, *rest = words
    if program == "cocoa":
        return _cocoa_fault(rest)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        return next((f"no target {word}" for word in rest if "=" not in word and word not in targets), None)
    if rest[:1] == ["install"]:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        known = re.findall(
            r"^([\w-]+) = \[", project.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M
        )
        listed = re.findall(r"(?:^|\s)(?:\.|cocoa-integrations)\[([\w,-]+)\]", " ".join(rest))
        return next(
            (f"no extra {extra}" for extras in listed for extra in extras.split(",") if extra not in known), None
        )
    if program.startswith("python"):
        if rest[:1] == ["-m"] and rest[1].split(".")[0] in ("cocoa_engine", "cocoa_integrations", "benchmarks", "docs"):
            return None if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
        if rest and rest[0].endswith(".py"):
            return None if (ROOT / rest[0]).exists() else f"no file {rest[0]}"
    return None


def _cocoa_fault(words: list[str]) -> str | None:
    if words and words[0] in ("--help", "--version"):
        return None
    if not words or words[0] not in commands():
        return "no such command"
    if "--help" in words:
        return None
    try:
        commands()[words[0]].make_context(words[0], words[1:])  # parsed, not run
    except Exception as error:
        # usage errors are Typer's own, or click's in its earlier versions
        return str(error.format_message() if hasattr(error, "format_message") else repr(error))
    return None
