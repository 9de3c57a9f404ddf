"""Small data files of every evaluation task, written by hand. Models behind a server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from cocoa_engine import CocoaEngine
from tests.helpers.eval_data import write_jsonl, write_truthfulqa

MODELS = ("quick_chat", "llm", "caller")
"""Fixtures with a model that can be in this process (``"here"``) or behind a server (``"remote"``)."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked ``also_remote`` twice: with a model in this process, and with the same one behind a server.

    A mark on a module applies to all of its tests with such a model, but for those marked ``also_remote(False)``.
    """
    marker = metafunc.definition.get_closest_marker("also_remote")
    if marker is not None and marker.args != (False,):
        for name in MODELS:
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, ["here", "remote"], indirect=True)


@pytest.fixture(scope="module")
def url(engine: CocoaEngine) -> Iterator[str]:
    """The address of a server with the module's engine."""
    from tests.helpers.live_server import serving

    with serving(engine) as url:
        yield url


@pytest.fixture
def truthfulqa(tmp_path: Path) -> Path:
    return write_truthfulqa(tmp_path / "TruthfulQA.csv")


@pytest.fixture
def data_files(tmp_path: Path, truthfulqa: Path) -> dict[str, Path]:
    """A data file of two or three records for each task, in the shape in which it is published."""
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
