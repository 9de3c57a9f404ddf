"""Small data files of every task, written by hand, and the command with its entry point."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cocoa_engine import CocoaEngine
from cocoa_engine.cli import plugins
from cocoa_engine.cli.app import app
from tests.evaluation.eval_data import write_jsonl, write_truthfulqa

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def truthfulqa(tmp_path: Path) -> Path:
    return write_truthfulqa(tmp_path / "TruthfulQA.csv")


@pytest.fixture
def data_files(tmp_path: Path, truthfulqa: Path) -> dict[str, Path]:
    """A data file of two or three records for each task, in the shape in which it is published."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "data"
    folder.mkdir()
    nq = [
        {"question": "who wrote hamlet", "answers": ["William Shakespeare", "Shakespeare"],
         "ctxs": [{"title": "Hamlet", "text": "Hamlet is a play by William Shakespeare."}]},
        {"question": "what colour is a ripe banana", "answers": ["yellow"],
         "ctxs": [{"title": "Banana", "text": "A ripe banana is yellow."}]},
    ]  # fmt: skip
    swap = [
        {"question": "who wrote hamlet", "org_context": "Hamlet is a play by William Shakespeare.",
         "org_answer": ["William Shakespeare"], "sub_context": "Hamlet is a play by Tom Smith.",
         "sub_answer": ["Tom Smith"]},
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(swap), folder / "nq_swap.parquet")
    samsum = [{"id": "a1", "dialogue": "Ann: Tea?\nBob: Yes, please.", "summary": "Bob wants tea."}]
    xsum = [{"id": "7", "document": "A bridge in Leeds was closed on Monday after a storm.", "summary": "Bridge shut."}]
    mbpp = [
        {"task_id": 1, "prompt": "Write a function to add two numbers.", "code": "def add(a, b):\n    return a + b",
         "test_imports": ["import math"], "test_list": ["assert add(1, 2) == 3", "assert add(0, math.inf) == math.inf"]}
    ]  # fmt: skip
    (folder / "mbpp.json").write_text(json.dumps(mbpp), encoding="utf-8")
    gsm8k = [{"question": "Ann has 2 pens and buys 3. How many has she?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}]
    return {
        "truthfulqa_gen": truthfulqa,
        "truthfulqa_mc": truthfulqa,
        "nq": write_jsonl(folder / "nq.jsonl", nq),
        "nq_swap": folder / "nq_swap.parquet",
        "samsum": write_jsonl(folder / "samsum.jsonl", samsum),
        "xsum": write_jsonl(folder / "xsum.jsonl", xsum),
        "mbpp": folder / "mbpp.json",
        "gsm8k": write_jsonl(folder / "gsm8k.jsonl", gsm8k),
    }


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A folder that, on Python's path, declares the commands that pyproject.toml declares: as an installed package."""
    declared = re.search(
        r'^\[project\.entry-points\."cocoa\.commands"\]\n((?:.+\n)+)',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert declared
    info = tmp_path / "site" / "cocoa_as_installed-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cocoa-as-installed\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[cocoa.commands]\n{declared[1]}".replace('"', ""))
    return info.parent


@pytest.fixture
def cocoa(engine: CocoaEngine, entry_point: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``cocoa`` with some arguments in this process, on the model of the other tests."""
    monkeypatch.syspath_prepend(str(entry_point))
    plugins.plugin_commands.cache_clear()
    plugins.load_command.cache_clear()
    monkeypatch.setattr(CocoaEngine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *args: CliRunner().invoke(app, list(map(str, args)), prog_name="cocoa")
