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
    example = runpy.run_path(str(EXAMPLES / "llamaindex_retry.py"))
    example["main"]()
    first, second = re.split("question: ", capsys.readouterr().out)[1:]
    _check_tries(first, example["THRESHOLD"], 1)
    assert "1874 by the engineer Marta Lindqvist" in first
    _check_tries(second, example["THRESHOLD"], 2)
    assert re.search(r"<- kept\n.* 35 minutes", second)


def _check_tries(printed: str, threshold: float, expected: int) -> None:
    tries = re.findall(r"(?m)^try \d: (\d) passages, alpha (\d+(?:\.\d)?), risk (\d\.\d{3})( +<- kept)?$", printed)
    assert [(top_k, alpha) for top_k, alpha, _, _ in tries] == [("1", "2.5"), ("2", "5"), ("4", "10")][: len(tries)]
    assert [bool(kept) for _, _, _, kept in tries].count(True) == 1
    assert len(tries) == expected
    assert [float(risk) >= threshold for _, _, risk, _ in tries] == [True] * (expected - 1) + [False]
    assert "sources of the answer: " in printed
