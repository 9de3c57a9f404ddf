"""The engine's examples run as they stand; those of the adapters are run beside their tests."""

from __future__ import annotations

import base64
import io
import re
import runpy
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from cocoa_engine import CocoaEngine
from tests.helpers.paths import EXAMPLES, ROOT

pytestmark = pytest.mark.slow


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


def test_notebook() -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)  # none is kept: they would change with every run
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    answer, compared, along, layers, scored = [
        [output.data for output in cell.outputs if "data" in output][-1] for cell in cells
    ]
    assert answer["text/html"].startswith('<div class="cocoa-risk">')
    assert compared["text/html"].count('<div class="cocoa-answer">') == 2
    for figure in (along, layers):
        assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")
    assert "a text scored as given" in scored["text/html"]
