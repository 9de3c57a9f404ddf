"""The report of a response of every response mode: each span of the shown text once, at its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.response.schema import Response
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.query_engine import (
    CustomQueryEngine,
    RetrieverQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.report import RiskReport
from cocoa_integrations.llama_index import (
    CocoaLLM,
    MissingRiskWarning,
    RiskQueryEngine,
    RiskRetryQueryEngine,
)
from cocoa_integrations.llama_index.answers import joined, parts_of
from cocoa_integrations.llama_index.callbacks import Collected
from cocoa_integrations.llama_index.retrieved import by_source_node
from tests.helpers.llama_index_helpers import Finds, answered
from tests.helpers.made_up_answers import generation

QUESTION = "Who is it?"
TEXTS = (
    "The tower is red and it is old, and the man in it is Otto.",
    "Bread is sold at nine in the morning.",
    "It rains.",
)
SEPARATOR = "\n---------------------\n"


@pytest.fixture(params=[True, False], ids=["chat", "text"])
def tiny(engine: CocoaEngine, request: pytest.FixtureRequest) -> CocoaLLM:
    return CocoaLLM(engine=engine, max_new_tokens=12, is_chat_model=request.param)


@pytest.fixture
def chat(engine: CocoaEngine) -> CocoaLLM:
    return CocoaLLM(engine=engine, max_new_tokens=12)


def over(llm: CocoaLLM, mode: str, *, streaming: bool = False, use_async: bool = False) -> RetrieverQueryEngine:
    """A query engine that answers each text by itself, in every mode that takes several calls."""
    helper = PromptHelper(context_window=4096, num_output=16, chunk_size_limit=20, chunk_overlap_ratio=0.0)
    synthesizer = get_response_synthesizer(
        llm=llm, response_mode=ResponseMode(mode), prompt_helper=helper, streaming=streaming, use_async=use_async
    )
    return RetrieverQueryEngine(Finds(*TEXTS), response_synthesizer=synthesizer)


def text_of(report: dict[str, Any]) -> str:
    return "".join(span["text"] for span in report["spans"])


def check(shown: str, report: dict[str, Any]) -> None:
    """The spans of a report stand in the shown text, in order, none twice; the sums are those of the spans."""
    spans = report["spans"]
    assert spans
    assert [span["span"] for span in spans] == list(range(len(spans)))
    assert [shown[span["start"] : span["end"]] for span in spans] == [span["text"] for span in spans]
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(spans))
    risks = [span["risk"] for span in spans]
    assert report["max_risk"] == max(risks)
    assert report["mean_risk"] == pytest.approx(sum(risks) / len(risks))
    assert report["risk_points"] == sum(span["kind"] == "risk_point" for span in spans)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["query", "aquery"])
@pytest.mark.parametrize(
    ("mode", "calls"),
    [("refine", 3), ("compact", 2), ("tree_summarize", 3), ("simple_summarize", 1), ("generation", 1)],
)
async def test_one_answer(mode: str, calls: int, how: str, streaming: bool, tiny: CocoaLLM) -> None:
    engine = RiskQueryEngine(over(tiny, mode, streaming=streaming))
    shown, response = await answered(engine, how, QUESTION)
    metadata = response.metadata
    report = metadata["cocoa_risk"]
    check(shown, report)
    assert text_of(report) == shown
    assert "parts" not in report
    assert len(metadata["cocoa_reports"]) >= calls
    assert report == metadata["cocoa_reports"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("how", ["query", "aquery"])
@pytest.mark.parametrize(("mode", "count"), [("accumulate", 3), ("compact_accumulate", 2)])
async def test_accumulated_answers(mode: str, count: int, how: str, use_async: bool, tiny: CocoaLLM) -> None:
    shown, response = await answered(RiskQueryEngine(over(tiny, mode, use_async=use_async)), how, QUESTION)
    metadata = response.metadata
    report, reports = metadata["cocoa_risk"], metadata["cocoa_reports"]
    check(shown, report)
    assert len(reports) >= count
    assert sorted(part["report"] for part in report["parts"]) == list(range(len(reports)))  # each answer once
    texts = [shown[part["start"] : part["end"]] for part in report["parts"]]
    assert shown == SEPARATOR.join(f"Response {number}: {text}" for number, text in enumerate(texts, 1))
    assert text_of(report) == "".join(texts)
    for part in report["parts"]:
        own = reports[part["report"]]
        inside = [span for span in report["spans"] if part["start"] <= span["start"] and span["end"] <= part["end"]]
        assert [span["risk"] for span in inside] == [span["risk"] for span in own["spans"]]
        assert [span["start"] - part["start"] for span in inside] == [span["start"] for span in own["spans"]]
    assert report["max_risk"] == max(own["max_risk"] for own in reports)
    assert report["method"] == "cocoa-sig"


class Fact(BaseModel):
    """A fact."""

    name: str


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"response_mode": "no_text"}, "response_mode='no_text' calls no LLM"),
        ({"response_mode": "context_only"}, "response_mode='context_only' calls no LLM"),
        ({"response_mode": "accumulate", "streaming": True}, "response_mode='accumulate' cannot stream"),
        (
            {"response_mode": "compact_accumulate", "streaming": True},
            "response_mode='compact_accumulate' cannot stream",
        ),
        ({"response_mode": "accumulate", "output_cls": Fact}, "response_mode='accumulate' with an output_cls"),
    ],
)
def test_modes_without_a_report_are_refused(
    options: dict[str, Any], words: str, chat: CocoaLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "streaming" not in options:  # its tries do not stream
        with pytest.raises(ConfigError, match=words):
            RiskRetryQueryEngine(Finds(*TEXTS), chat, threshold=0.5, top_k_growth=1, **options)
    monkeypatch.setattr(Settings, "_llm", chat)
    options = {**options, "response_mode": ResponseMode(options["response_mode"])}
    inner = RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=chat, **options)
    with pytest.raises(ConfigError, match=words):
        RiskQueryEngine(inner)
    with pytest.raises(ConfigError, match=words):
        RiskQueryEngine(TransformQueryEngine(inner, IdentityQueryTransform()))


class Wrapping(CustomQueryEngine):
    """Changes the text of a response."""

    inner: Any
    change: Callable[[str], str]

    def custom_query(self, query_str: str) -> Any:
        response = self.inner.query(query_str)
        return Response(self.change(str(response)), response.source_nodes, response.metadata)


@pytest.mark.parametrize("change", [lambda text: text[::-1], lambda text: f"Answer: {text}", lambda text: text[:4]])
def test_a_changed_text_has_no_report(change: Callable[[str], str], chat: CocoaLLM) -> None:
    engine = RiskQueryEngine(Wrapping(inner=over(chat, "compact"), change=change))
    with pytest.warns(MissingRiskWarning, match="does not tell which answer"):
        response = engine.query(QUESTION)
    assert response.metadata["cocoa_risk"] is None  # type: ignore[index]
    assert response.metadata["cocoa_reports"]  # type: ignore[index]


def collected(*texts: str) -> list[Collected]:
    """Answers of two spans each, requested in the opposite order of their completion."""
    answers = []
    for number, text in enumerate(texts):
        half = len(text) // 2
        answer = generation((text[:half], 0.1 + number / 10), (text[half:], 0.2)).model_copy(
            update={"model_name": "quick", "answer_risk": 0.1 * number}
        )
        answers.append(Collected(RiskReport.of(answer), answer, None, -number))
    return answers


@pytest.mark.parametrize(
    ("shown", "answers", "expected"),
    [
        ("Response 1: 1\n---------------------\nResponse 2: no 1", ["no 1", "1"], [1, 0]),
        ("Response 1: Yes\n---------------------\nResponse 2: Empty Response", ["", "Yes"], [1, 0]),
        ("Response 1: Yes", ["Yes", "What?"], [0]),  # after a rewritten question
        ("Empty Response", ["x y", ""], [1]),
        ("a b", [" a b\n", "c"], [0]),
        ("yes", ["yes", "yes"], [1]),
        ("Answer: it is so.", ["so", "it is so."], []),
        ("First yes, then no.", ["no", "yes"], []),
        ("Otto", ['{"query_satisfied": true, "answer": "Otto"}'], []),
        ("yes or yes", ["yes"], []),
        ("Nothing", ["yes"], []),
    ],
)
def test_places_of_answers(shown: str, answers: list[str], expected: list[int]) -> None:
    given = collected(*answers)
    parts = parts_of(shown, given)
    assert [part.number for part in parts] == expected
    if not parts:
        return
    report = joined(parts, shown)
    assert all(shown[span.start : span.end] == span.text for span in report.spans)
    assert report.model_name == "quick"
    assert report.answer_risk == (given[expected[0]].report.answer_risk if len(expected) == 1 else None)
    assert "".join(span.text or "" for span in report.spans) in "".join(answers[number] for number in expected)


NODES = [NodeWithScore(node=TextNode(id_=name, text=name)) for name in "abc"]


@pytest.mark.parametrize(
    ("names", "nodes", "expected"),
    [
        (["c", "a"], NODES, [0.2, None, 0.1]),
        (["c", "a"], [*NODES, NODES[2]], [0.2, None, 0.1, 0.1]),  # a response may have a node twice
        (["x", "y"], NODES, None),
        ([], NODES, None),  # sources that the caller named
    ],
)
def test_values_are_in_the_order_of_the_source_nodes(
    names: list[str], nodes: list[NodeWithScore], expected: list[float | None] | None
) -> None:
    assert by_source_node([0.1, 0.2], names, nodes) == expected
