"""The examples run as they stand."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.helpers.paths import EXAMPLES

pytestmark = pytest.mark.slow


def test_rag_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "llamaindex_rag.py"))["main"]()
    printed = capsys.readouterr().out
    question, answer, *lines = printed.splitlines()
    assert question == "question: Who built the lighthouse, and in which year?"
    assert "Lindqvist" in answer
    texts = [line.split(maxsplit=1)[1] for line in lines if "Lindqvist" in line]
    assert texts
    assert "lighthouse.md" in printed


def test_retry_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "llamaindex_retry.py"))["main"]()
    printed = capsys.readouterr().out
    tries = re.findall(r"(?m)^try \d: (\d) passages, alpha (\d+(?:\.\d)?), risk (\d\.\d{3})( +<- kept)?$", printed)
    assert [(top_k, alpha) for top_k, alpha, _, _ in tries] == [("1", "2.5"), ("2", "5"), ("4", "10")][: len(tries)]
    assert [bool(kept) for _, _, _, kept in tries].count(True) == 1
    assert all(float(risk) > 0.63 for _, _, risk, _ in tries[:-1])
    assert "41 metres" in printed
    assert "sources of the answer: " in printed
