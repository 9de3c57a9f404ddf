"""The examples in docstrings run on the embedded model, and the engine's examples as they stand.

Where an example in a docstring shows output, it is compared. The examples of the adapters are run beside their tests.
"""

import ast
import doctest
import gc
import io
import pkgutil
import re
import runpy
from contextlib import ExitStack
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.instrumentation import get_dispatcher

import cocoa_engine
import cocoa_integrations
from cocoa_engine import CocoaEngine
from cocoa_integrations import langchain
from cocoa_integrations.server import create_app
from cocoa_integrations.transformers import Cocoa
from tests.helpers.eval_data import write_truthfulqa
from tests.helpers.live_server import served
from tests.helpers.paths import EXAMPLES

pytestmark = pytest.mark.slow

SERVER = "http://127.0.0.1:8000"  # the address of `cocoa serve` in the examples
SKIPPED = {"cocoa_integrations.lm_eval": 1}  # the harness downloads the data set
EXECUTABLE = ".__main__"  # modules that run when they are imported


def _examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found: dict[str, doctest.DocTest] = {}
    for package in (cocoa_engine, cocoa_integrations):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            path = Path(getattr(module.module_finder, "path", "")) / module.name.rpartition(".")[2]
            source = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
            if not module.name.endswith(EXECUTABLE) and ">>> " in source.read_text(encoding="utf-8"):
                found |= {test.name: test for test in finder.find(import_module(module.name), module.name)}
        found |= {test.name: test for test in finder.find(package, package.__name__)}
    return [test for _, test in sorted(found.items()) if test.examples]


IN_DOCSTRINGS = _examples()


class _Checker(doctest.OutputChecker):
    """An example without output is code only: what it prints is not compared. An exception always fails."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return want == "" or super().check_output(want, got, optionflags)


def _names(engine: CocoaEngine, parts: set[str]) -> dict[str, Any]:
    """What the examples of a package use without making it."""
    names: dict[str, Any] = {"engine": engine}
    if "transformers" in parts:
        tokenizer = engine.tokenizer
        inputs = {"input_ids": torch.tensor([engine.encode("The capital of France is")])}
        names |= {"model": engine.model, "tokenizer": tokenizer, "inputs": inputs, "cocoa": Cocoa(tokenizer=tokenizer)}
    if "llama_index" in parts:
        names["get_dispatcher"] = get_dispatcher
    if {"langchain", "reports"} & {*parts}:
        names |= {name: getattr(langchain, name) for name in langchain.__all__}
        names |= {"create_agent": create_agent, "HumanInTheLoopMiddleware": HumanInTheLoopMiddleware}
        prompt = ChatPromptTemplate.from_template("{question}")
        names |= {"itemgetter": itemgetter, "StrOutputParser": StrOutputParser, "prompt": prompt}
        names |= {"llm": langchain.CocoaLLM(), "chain": prompt | langchain.ChatCocoa(max_tokens=32)}
    return names


def test_every_example_is_found_and_those_that_are_skipped_are_listed() -> None:
    """The number of examples is that of the lines that begin one."""
    folders = (Path(package.__path__[0]) for package in (cocoa_engine, cocoa_integrations))
    texts = (path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    begun = sum(line.lstrip().startswith(">>> ") for text in texts for line in text.splitlines())
    assert sum(len(test.examples) for test in IN_DOCSTRINGS) == begun > 40
    skipped = {
        test.name: number
        for test in IN_DOCSTRINGS
        if (number := sum(doctest.SKIP in one.options and one.options[doctest.SKIP] for one in test.examples))
    }
    assert skipped == SKIPPED


@pytest.mark.parametrize("example", IN_DOCSTRINGS, ids=lambda test: test.name)
def test_examples_run(
    example: doctest.DocTest, engine: CocoaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what earlier examples hold in cycles (agents) would share its engine
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *model, **options: engine)
    monkeypatch.setattr(get_dispatcher(), "event_handlers", list(get_dispatcher().event_handlers))
    monkeypatch.chdir(tmp_path)
    write_truthfulqa(tmp_path / "TruthfulQA.csv")
    report: list[str] = []
    names = _names(engine, set(example.name.split(".")))
    with ExitStack() as stack:
        url = stack.enter_context(served(create_app(engine))) if SERVER in example.docstring else SERVER
        text, place = example.docstring.replace(SERVER, url), (example.name, example.filename, example.lineno)
        test = doctest.DocTestParser().get_doctest(text, {**example.globs, **names}, *place)
        doctest.DocTestRunner(_Checker(), verbose=False).run(test, out=report.append)
    assert report == []


def test_engine(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda: engine)  # loaded already
    runpy.run_path(str(EXAMPLES / "engine.py"), run_name="__main__")
    out = capsys.readouterr().out
    for part in ("answer: ", "check '", "kept", "greedy's", "stream: [", "batch:", "score:", "' Paris.'"):
        assert part in out


def test_chat(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[dict[str, str]]] = []
    stream_chat = engine.stream_chat

    def short(messages: list[dict[str, str]], **_: Any) -> Any:
        asked.append(list(messages))
        return stream_chat(messages, max_new_tokens=8)

    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda: engine)
    monkeypatch.setattr(engine, "stream_chat", short)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who wrote Dune?\nWhen?\n"))
    runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]
    assert asked[1][1]["content"] == engine.chat(asked[0], max_new_tokens=8).text
    out = capsys.readouterr().out
    assert out.count("Whole answer: ") == 2
    assert re.search(r"\[\w+\|[123]\]", out)


def test_notebook(engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order, and what each shows has the form that a notebook asks for."""
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda: engine)
    cells = [
        cell for cell in nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4).cells if cell.cell_type == "code"
    ]
    assert not any(cell.outputs for cell in cells)  # none is kept: they would change with every run
    names: dict[str, Any] = {}
    values = []
    for cell in cells:
        *statements, last = ast.parse(cell.source).body
        exec(compile(ast.Module(statements, []), "notebook", "exec"), names)
        assert isinstance(last, ast.Expr)
        values.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
    answer, compared, along, scored = values
    assert answer._repr_html_().startswith('<div class="cocoa-risk">')
    assert compared._repr_html_().count('<div class="cocoa-answer">') == 2
    assert along._repr_png_().startswith(b"\x89PNG")
    assert "a text scored as given" in scored._repr_html_()
