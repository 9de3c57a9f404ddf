"""The example runs as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "llamaindex_rag.py"


def test_rag_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"]()
    printed = capsys.readouterr().out
    question, answer, *lines = printed.splitlines()
    assert question == "question: Who built the lighthouse, and in which year?"
    assert "Lindqvist" in answer
    texts = [line.split(maxsplit=1)[1] for line in lines if "Lindqvist" in line]
    assert texts
    assert "lighthouse.md" in printed
