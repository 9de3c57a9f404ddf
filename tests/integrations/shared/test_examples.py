"""The examples of both adapters run as they stand, with the embedded default model."""

import ast
import re
import runpy

import pytest

from cocoa_integrations.langchain import ChatCocoa
from tests.helpers.paths import EXAMPLES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def default_model() -> ChatCocoa:
    """Loaded once: while it is held, every model of the same loading options shares it."""
    chat = ChatCocoa()
    chat.load()
    return chat


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_langchain_lcel(capsys: pytest.CaptureFixture[str]) -> None:
    text, report = run("langchain_lcel.py", capsys).split("\n\n", 1)
    head, *lines = report.strip().splitlines()
    assert re.fullmatch(r"cocoa-sig, \d+ risk points, highest risk \d\.\d{3}", head)
    spans = [re.fullmatch(r"(\d\.\d{3})  (?:greedy|risk_point) +(.+)", line).groups() for line in lines]
    assert len(spans) > 2
    assert [risk for risk, _ in spans] == sorted((risk for risk, _ in spans), reverse=True)
    texts = [ast.literal_eval(shown) for _, shown in spans]
    assert all(part in text for part in texts)
    assert sum(map(len, texts)) == len(text)


def test_langchain_callback(capsys: pytest.CaptureFixture[str]) -> None:
    out = run("langchain_callback.py", capsys)
    assert "Jupiter" in out
    assert len(re.findall(r"candidate\(s\)", out)) > 4
    assert len(re.findall(r"(?m)^\d\.\d{3} at most, \d\.\d{3} on average: ", out)) == 2


def test_langgraph_agent(capsys: pytest.CaptureFixture[str]) -> None:
    told, made_up = run("langgraph_agent.py", capsys).strip().split("\n\n")
    assert "tool: Booked: Luigi's, 4 people, 19:30." in told
    risks = dict(re.findall(r"(?m)^  (\w+)=.*  risk (\d\.\d{3})$", made_up))
    assert risks.keys() == {"restaurant", "people", "time"}
    assert float(risks["restaurant"]) > 0.2
    assert "tool: book_table was not run: the risk of these arguments reaches 0.2: restaurant=" in made_up


def test_langchain_abstain(capsys: pytest.CaptureFixture[str]) -> None:
    known, unknown = re.split(r"\n(?=Who)", run("langchain_abstain.py", capsys).strip())
    assert "Paris" in known
    assert "withheld" not in known
    assert "  I don't know.   (highest risk " in unknown
    assert re.search(r"withheld: \S+", unknown)


def test_cascade(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "cascade.py"))["main"](threshold=0.36)
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [(len(risks), float(risks[0]) >= 0.36) for _, *risks, _ in lines] == [(1, False), (2, True), (2, True)]
    assert "Marta Lindqvist" in lines[0][-1]


def test_llamaindex_rag(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "llamaindex_rag.py"))["main"]()
    printed = capsys.readouterr().out
    question, answer, *lines = printed.splitlines()
    assert question == "question: Who built the lighthouse, and in which year?"
    assert "Lindqvist" in answer
    texts = [line.split(maxsplit=1)[1] for line in lines if "Lindqvist" in line]
    assert texts
    assert "lighthouse.md" in printed


def test_llamaindex_retry(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "llamaindex_retry.py"))
    example["main"]()
    first, second = re.split("question: ", capsys.readouterr().out)[1:]
    line = r"(?m)^try \d: (\d) passages, alpha (\d+(?:\.\d)?), risk (\d\.\d{3})( +<- kept)?$"
    for printed, expected in ((first, [("1", "2.5")]), (second, [("1", "2.5"), ("2", "5")])):
        tries = re.findall(line, printed)
        assert [(top_k, alpha) for top_k, alpha, _, _ in tries] == expected
        assert [bool(chosen) for _, _, _, chosen in tries].count(True) == 1
        *above, below = [float(risk) >= example["THRESHOLD"] for _, _, risk, _ in tries]
        assert (all(above), below) == (True, False)
        assert "sources of the answer: " in printed
    assert "1874 by the engineer Marta Lindqvist" in first
    assert re.search(r"<- kept\n.* 35 minutes", second)
