"""Query and chat engines that report, mark and cite what they answer, in every response mode and around each other."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import Document, Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    CustomQueryEngine,
    RetrieverQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.retrievers.bm25 import BM25Retriever
from pydantic import PrivateAttr

from cocoa_engine import CocoaEngine, ConfigError, Generation
from cocoa_engine.errors import HallucinationRiskError
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations._shared.edits import replacement
from cocoa_integrations._shared.limits import Limit
from cocoa_integrations.llama_index import (
    CocoaLLM,
    CocoaRiskEvent,
    MissingRiskWarning,
    RiskChatEngine,
    RiskCitationQueryEngine,
    RiskQueryEngine,
    RiskRetryQueryEngine,
    answers,
    collect_risk,
    get_risk,
)
from cocoa_integrations.llama_index.answers import joined, parts_of
from cocoa_integrations.llama_index.callbacks import Collected, Observers
from cocoa_integrations.llama_index.retrieved import by_source_node, shares_a_run
from tests.helpers import edited_answers
from tests.helpers.alike import stand_in, to_dicts, without_markers
from tests.helpers.inside import opened_trees
from tests.helpers.llama_index_helpers import Finds, Listener, answered
from tests.helpers.made_up_answers import generation
from tests.helpers.paths import CORPUS

BUILT = "Who built the lighthouse, and in which year?"
QUESTION = "Who is it?"
TEXTS = (
    "The tower is red and it is old, and the man in it is Otto.",
    "Bread is sold at nine in the morning.",
    "It rains.",
)


def text_of(report: dict[str, Any]) -> str:
    return "".join(span["text"] for span in report["spans"])


@pytest.fixture(scope="module")
def nodes() -> list[Any]:
    documents = [Document(text=path.read_text(), metadata={"file": path.name}) for path in sorted(CORPUS.glob("*.md"))]
    return SentenceSplitter(chunk_size=128, chunk_overlap=0).get_nodes_from_documents(documents)


@pytest.fixture(scope="module")
def retriever(nodes: list[Any]) -> BM25Retriever:
    return BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=2)


@pytest.mark.also_remote
@pytest.mark.parametrize(
    ("mode", "streaming"),
    [(ResponseMode.COMPACT, False), (ResponseMode.REFINE, True), (ResponseMode.ACCUMULATE, False)],
)
async def test_the_retrieved_nodes_are_the_passages(
    mode: ResponseMode, streaming: bool, llm: CocoaLLM, retriever: BM25Retriever
) -> None:
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, streaming=streaming)
    _, response = await answered(RiskQueryEngine(inner), "query" if streaming else "aquery", BUILT)
    assert len(response.source_nodes) == 2
    spans = response.metadata["cocoa_risk"]["spans"]
    seen = {tuple(value is not None for value in one["passage_attention"]) for one in spans}
    # the prompt has both nodes; each answer was written from one; the last answer was refined by the second node
    expected = {
        ResponseMode.COMPACT: {(True, True)},
        ResponseMode.ACCUMULATE: {(True, False), (False, True)},
        ResponseMode.REFINE: {(False, True)},
    }
    assert seen == expected[mode]


class LastAndFirst(BaseNodePostprocessor):
    """Ranks the last node first, and drops those between it and the first."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: Any = None) -> list[NodeWithScore]:
        return [nodes[-1], nodes[0]]


@pytest.mark.also_remote
@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.ACCUMULATE])
def test_passages_have_the_order_of_reranked_source_nodes(
    mode: ResponseMode, llm: CocoaLLM, nodes: list[Any], heard: Listener
) -> None:
    retriever = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=3)
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, node_postprocessors=[LastAndFirst()])
    response = RiskQueryEngine(inner).query(BUILT)
    first, _, last = (node.node_id for node in retriever.retrieve(BUILT))
    assert [node.node_id for node in response.source_nodes] == [last, first]
    measured = [  # of each call, by the nodes in its prompt in the order in which they were retrieved
        [span.passage_attention for span in event.report.spans] for event in heard.of(CocoaRiskEvent)
    ]
    if mode is ResponseMode.COMPACT:
        [whole] = measured
        expected = [[[of_last, of_first] for of_first, of_last in whole]]
        assert all(of_first != of_last for of_first, of_last in whole)
    else:
        expected = [[[value, None] for [value] in measured[0]], [[None, value] for [value] in measured[1]]]
    found = [[one["passage_attention"] for one in each["spans"]] for each in response.metadata["cocoa_reports"]]
    assert found == expected
    shown = [one["passage_attention"] for one in response.metadata["cocoa_risk"]["spans"]]
    assert shown == [one for of_answer in expected for one in of_answer]


@pytest.mark.also_remote
def test_passages_of_given_nodes_and_of_none(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    engine = RiskQueryEngine(RetrieverQueryEngine.from_args(retriever, llm=llm))
    found = list(reversed(retriever.retrieve(BUILT)))
    response = engine.synthesize(QueryBundle(BUILT), found)
    assert all(None not in one["passage_attention"] for one in response.metadata["cocoa_risk"]["spans"])  # type: ignore[index]
    with collect_risk() as reports:
        llm.complete("The lighthouse is old, and ")
        RetrieverQueryEngine.from_args(retriever, llm=llm).query(BUILT)  # nothing collects its nodes
    assert not any(span.passage_attention for report in reports for span in report.spans)


async def test_a_stream_has_its_risk_at_its_end_only(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
    stream = RiskQueryEngine(inner).query(BUILT)
    assert isinstance(stream, StreamingResponse)
    first = next(stream.response_gen)
    assert stream.metadata is not None
    assert stream.metadata["cocoa_risk"] is None
    whole = stream.get_response()
    assert first + (whole.response or "") == text_of(whole.metadata["cocoa_risk"])  # type: ignore[index]
    broken_off = RiskQueryEngine(inner).query(BUILT)
    assert isinstance(broken_off, StreamingResponse)
    next(broken_off.response_gen)
    broken_off.response_gen.close()
    assert broken_off.metadata == {**(broken_off.metadata or {}), "cocoa_risk": None, "cocoa_reports": []}


async def test_an_answer_without_a_report_is_kept(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    other = RiskQueryEngine(RetrieverQueryEngine.from_args(retriever, llm=MockLLM()))
    nothing = RiskQueryEngine(RetrieverQueryEngine.from_args(Finds(), llm=llm))
    for engine, how in ((other, "query"), (other, "aquery"), (nothing, "query")):
        with pytest.warns(MissingRiskWarning, match="no CocoaLLM generated it"):
            text, response = await answered(engine, how, BUILT)
        assert text
        assert (response.metadata["cocoa_risk"], response.metadata["cocoa_reports"]) == (None, [])


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((ContextChatEngine, how) for how in ("chat", "achat", "stream_chat", "astream_chat")),
        *((CondensePlusContextChatEngine, how) for how in ("chat", "astream_chat")),
    ],
)
async def test_chat_engine(kind: type[Any], how: str, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    engine = RiskChatEngine(kind.from_defaults(retriever=retriever, llm=llm))
    texts = []
    for number, question in enumerate((BUILT, "How high is it?")):
        text, response = await answered(engine, how, question)
        metadata = response.metadata
        assert text.strip() == text_of(metadata["cocoa_risk"]).strip() != ""
        # CondensePlusContext first asks the model to rewrite the second question
        assert len(metadata["cocoa_reports"]) == (2 if kind is CondensePlusContextChatEngine and number else 1)
        assert len(response.source_nodes) == 2
        texts.append(text.strip())
    assert [message.content for message in engine.chat_history][1::2] == texts
    assert all("cocoa" not in message.model_dump_json() for message in engine.chat_history)
    engine.reset()
    assert engine.chat_history == []


@pytest.mark.parametrize("how", ["stream_chat", "astream_chat"])
async def test_a_chat_stream_keeps_the_citations_of_its_query_engine(
    how: str, llm: CocoaLLM, retriever: BM25Retriever
) -> None:
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
    cited = RiskCitationQueryEngine(inner, min_attention=0.0)
    chat = RiskChatEngine(CondenseQuestionChatEngine.from_defaults(query_engine=cited, llm=MockLLM()))
    text, response = await answered(chat, how, BUILT)
    citations = response.metadata["cocoa_citations"]
    assert citations == response.sources[0].raw_output.metadata["cocoa_citations"] != []
    assert all(text[one["start"] : one["end"]] == one["text"] for one in citations)


@pytest.mark.also_remote
@pytest.mark.parametrize(("how", "mode"), [("query", "compact"), ("aquery", "accumulate")])
async def test_a_retry_streams_the_answer_that_it_returns(
    how: str, mode: str, llm: CocoaLLM, retriever: BM25Retriever
) -> None:
    def engine(**options: Any) -> RiskRetryQueryEngine:
        options = {"threshold": 0.0, "max_tries": 2, "mark": "<{text}>", "response_mode": mode, **options}
        return RiskRetryQueryEngine(retriever, llm, **options)

    for on_risk in ("keep", "mark", "abstain"):
        text, response = await answered(engine(on_risk=on_risk), how, BUILT)
        streamed, stream = await answered(engine(on_risk=on_risk, streaming=True), how, BUILT)
        assert isinstance(stream, AsyncStreamingResponse if how == "aquery" else StreamingResponse)
        assert streamed == text
        assert stream.metadata.keys() == response.metadata.keys()
        assert stream.metadata["cocoa_risk"].get("gate", {}).get("action") == (None if on_risk == "keep" else on_risk)
        assert len(stream.metadata["cocoa_tries"]) == len(response.metadata["cocoa_tries"])
    with pytest.raises(HallucinationRiskError):
        await answered(engine(on_risk="raise", streaming=True), how, BUILT)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_retried_response_is_cited(streaming: bool, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    def engine(**options: Any) -> RiskCitationQueryEngine:
        options = {"threshold": 0.0, "max_tries": 2, "streaming": streaming, **options}
        return RiskCitationQueryEngine(RiskRetryQueryEngine(retriever, llm, **options), min_attention=0.0)

    kept, response = await answered(engine(), "query", BUILT)
    (answer,) = [one["answer"] for one in response.metadata["cocoa_tries"] if one["chosen"]]
    assert without_markers(kept) == answer
    assert kept == answer or not streaming  # a stream has no markers
    assert stand_in(kept, response.metadata["cocoa_citations"])
    assert response.metadata["cocoa_citations"]
    said, of_said = await answered(engine(on_risk="abstain"), "query", BUILT)
    assert (said, of_said.metadata["cocoa_citations"]) == ("I don't know.", [])


def test_a_refusal_without_nodes_and_a_retry_that_finds_some(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    def engine(**options: Any) -> RiskRetryQueryEngine:
        return RiskRetryQueryEngine(Finds(), llm, **options)

    with pytest.warns(MissingRiskWarning):
        assert str(engine(max_tries=1, on_risk="abstain").query(BUILT)) == "I don't know."
    with pytest.warns(MissingRiskWarning), pytest.raises(HallucinationRiskError, match="has no report"):
        engine(max_tries=1, on_risk="raise").query(BUILT)
    with pytest.warns(MissingRiskWarning):
        response = engine(threshold=1.0, second_retriever=retriever).query(BUILT)
    first, second = response.metadata["cocoa_tries"]  # type: ignore[index]
    assert (first["risk"], first["source_nodes"], first["chosen"]) == (None, 0, False)
    assert (second["source_nodes"], second["chosen"], second["answer"]) == (2, True, str(response))


def test_only_engines_can_be_wrapped(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    with pytest.raises(ConfigError, match="wraps a query engine, not a BM25Retriever"):
        RiskQueryEngine(retriever)
    with pytest.raises(ConfigError, match="wraps a chat engine, not a RetrieverQueryEngine"):
        RiskChatEngine(RetrieverQueryEngine.from_args(retriever, llm=llm))  # type: ignore[arg-type]


TEMPLATE = PromptTemplate("{context_str}\n{query_str}\n")


def over_tower(llm: CocoaLLM, **options: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=llm, text_qa_template=TEMPLATE, **options)


LONG = (" ".join(["The tower is red, and it is old."] * 12), *TEXTS[1:])


def test_nodes_of_another_engine_are_attended_to_in_a_pass_of_the_answer_alone(
    engine: CocoaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of a CitationQueryEngine are made of those that were retrieved."""
    llm = CocoaLLM(engine=CocoaEngine(engine.model, engine.tokenizer), max_new_tokens=12)
    opened = opened_trees(llm.engine, monkeypatch)
    response = RiskCitationQueryEngine(CitationQueryEngine(Finds(*LONG), llm=llm), min_attention=0.0).query(QUESTION)
    spans = response.metadata["cocoa_risk"]["spans"]  # type: ignore[index]
    assert all(None not in span["source_attentions"] for span in spans)
    answered, fed_again = opened
    assert fed_again.cached_tokens == fed_again.prompt_tokens - 1 == answered.prompt_tokens - 1


def test_of_accumulated_answers(llm: CocoaLLM, caplog: pytest.LogCaptureFixture) -> None:
    """An answer cites only nodes of its own prompt."""
    engine = RiskCitationQueryEngine(over_tower(llm, response_mode=ResponseMode.ACCUMULATE), min_attention=0.0)
    response = engine.query(QUESTION)
    report = response.metadata["cocoa_risk"]  # type: ignore[index]
    assert stand_in(str(response), report["spans"])
    assert len(report["parts"]) == 3
    for number, part in enumerate(report["parts"]):
        assert str(response)[: part["start"]].endswith(f"Response {number + 1}: ")
        inside = [span for span in report["spans"] if part["start"] <= span["start"] and span["end"] <= part["end"]]
        assert inside
        for span in inside:
            assert [value is not None for value in span["source_attentions"]] == [node == number for node in range(3)]
            assert span["source"] in (None, number + 1)
    assert "not cited" not in caplog.text


def test_streams_and_texts_without_markers(llm: CocoaLLM) -> None:
    plain = str(RiskQueryEngine(over_tower(llm)).query(QUESTION))
    stream = RiskCitationQueryEngine(over_tower(llm, streaming=True), min_attention=0.0).query(QUESTION)
    assert isinstance(stream, StreamingResponse)
    assert "".join(stream.response_gen) == plain
    unmarked = RiskCitationQueryEngine(over_tower(llm), min_attention=0.0, markers=False).query(QUESTION)
    assert str(unmarked) == plain
    assert unmarked.metadata["cocoa_citations"] == stream.metadata["cocoa_citations"] != []  # type: ignore[index]
    assert stand_in(plain, unmarked.metadata["cocoa_citations"])  # type: ignore[index]


SEPARATOR = "\n---------------------\n"


@pytest.fixture(params=[True, False], ids=["chat", "text"])
def tiny(engine: CocoaEngine, request: pytest.FixtureRequest) -> CocoaLLM:
    return CocoaLLM(engine=engine, max_new_tokens=12, is_chat_model=request.param)


def over(llm: CocoaLLM, mode: str, *, streaming: bool = False, use_async: bool = False) -> RetrieverQueryEngine:
    """A query engine that answers each text by itself, in every mode that takes several calls."""
    helper = PromptHelper(context_window=4096, num_output=16, chunk_size_limit=20, chunk_overlap_ratio=0.0)
    synthesizer = get_response_synthesizer(
        llm=llm, response_mode=ResponseMode(mode), prompt_helper=helper, streaming=streaming, use_async=use_async
    )
    return RetrieverQueryEngine(Finds(*TEXTS), response_synthesizer=synthesizer)


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
    options: dict[str, Any], words: str, llm: CocoaLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "streaming" not in options:  # its tries do not stream
        with pytest.raises(ConfigError, match=words):
            RiskRetryQueryEngine(Finds(*TEXTS), llm, threshold=0.5, top_k_growth=1, **options)
    monkeypatch.setattr(Settings, "_llm", llm)
    options = {**options, "response_mode": ResponseMode(options["response_mode"])}
    inner = RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=llm, **options)
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
def test_a_changed_text_has_no_report(change: Callable[[str], str], llm: CocoaLLM) -> None:
    longer = llm.model_copy(update={"max_new_tokens": 12})
    engine = RiskQueryEngine(Wrapping(inner=over(longer, "compact"), change=change))
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


class Told(CustomLLM):
    """Gives made-up answers, and reports them as ``CocoaLLM`` does."""

    _answers: list[Generation] = PrivateAttr()

    def __init__(self, told: Sequence[Generation]) -> None:
        super().__init__()
        self._answers = list(told)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        told: Any = SimpleNamespace(report=RiskReport.of(answer), generation=answer)
        Observers().answer_complete(told)
        return CompletionResponse(text=answer.text)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        raise NotImplementedError


class Changing(CustomQueryEngine):
    """An engine that marks or replaces a response as ``RiskRetryQueryEngine`` does after its tries."""

    inner: Any
    change: Callable[[str, RiskReport], Any]

    def custom_query(self, query_str: str) -> Any:
        response = self.inner.query(query_str)
        if response.metadata["cocoa_risk"] is None:
            return response
        report = get_risk(response)
        change = self.change(str(response), report)
        metadata = {**response.metadata, "cocoa_risk": change.of_report(report).to_dict()}
        if "cocoa_citations" in metadata:
            citations = [Citation.from_wire(citation) for citation in metadata["cocoa_citations"]]
            metadata["cocoa_citations"] = to_dicts(change.moved(citations))
        return Response(response=change.text, source_nodes=response.source_nodes, metadata=metadata)


def marking(mark: Any, threshold: float) -> Callable[[BaseQueryEngine], BaseQueryEngine]:
    return lambda inner: Changing(
        inner=inner, change=lambda text, report: Limit(threshold).with_marks(text, report, mark)
    )


STEPS: dict[str, Callable[[BaseQueryEngine], BaseQueryEngine]] = {
    "report": RiskQueryEngine,
    "cite": lambda inner: RiskCitationQueryEngine(inner, min_attention=1.0),
    "mark": marking(edited_answers.MARKS[0], 0.3),
    "mark more": marking(edited_answers.MARKS[1], 0.5),
    "redact": marking(edited_answers.redact, 0.8),
    "abstain": lambda inner: Changing(
        inner=inner, change=lambda text, report: replacement(report, 2 * edited_answers.REDACTED)
    ),
}
MODES = [ResponseMode.COMPACT, ResponseMode.ACCUMULATE, ResponseMode.SIMPLE_SUMMARIZE]


def built(inner: BaseQueryEngine, steps: Sequence[str]) -> BaseQueryEngine:
    engine: BaseQueryEngine = RiskQueryEngine(inner)
    for step in steps:
        engine = STEPS[step](engine)
    return engine


def asked(mode: ResponseMode, spans: Sequence[Any], steps: Sequence[str], *, strip: bool) -> Any:
    told = [generation(*of_one) for of_one in spans]
    inner: BaseQueryEngine = RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=Told(told), response_mode=mode)
    if strip:
        inner = Wrapping(inner=inner, change=str.strip)
    return built(inner, steps).query("Who?")


@pytest.mark.slow
@given(
    st.sampled_from(MODES),
    st.lists(edited_answers.SPANS, min_size=1, max_size=3),
    edited_answers.VALUES,
    st.lists(st.sampled_from(list(STEPS)), max_size=4),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore::cocoa_integrations.llama_index.MissingRiskWarning")
def test_offsets_follow_any_engines(mode: Any, spans: Any, values: Any, steps: Any, strip: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_attention_by_node", lambda part, nodes: ([values[n] for n in part.numbers], True))
        plain = asked(mode, spans, [], strip=strip)
        response = asked(mode, spans, steps, strip=strip)
    report, before = response.metadata["cocoa_risk"], plain.metadata["cocoa_risk"]
    if report is None or before is None:
        assert report == before
        return
    text = str(response)
    edited_answers.assert_offsets_follow(text, report["spans"])
    for key in ("claims", "sentences", "parts"):
        edited_answers.assert_offsets_follow(text, report.get(key, []))
    edited_answers.assert_offsets_follow(text, report.get("check", []), ordered=False)
    citations = response.metadata.get("cocoa_citations", [])
    edited_answers.assert_offsets_follow(text, citations)
    assert [span["text"] for span in report["spans"]] == [span["text"] for span in before["spans"]]
    assert [span["risk"] for span in report["spans"]] == [span["risk"] for span in before["spans"]]
    if not {"redact", "abstain"} & set(steps):
        assert edited_answers.squeezed(text) == "".join(str(plain).split())
        edited_answers.assert_nested(text)
        for part, own in zip(report.get("parts", []), before.get("parts", []), strict=True):
            shown, of_answer = text[part["start"] : part["end"]], str(plain)[own["start"] : own["end"]]
            assert edited_answers.squeezed(shown) == "".join(of_answer.split())


@pytest.mark.parametrize("steps", [[], ["cite"], ["mark"], ["mark", "cite"], ["cite", "mark", "abstain"]])
@pytest.mark.parametrize("how", ["chat", "achat"])
@pytest.mark.filterwarnings("error::cocoa_integrations.llama_index.MissingRiskWarning")
async def test_a_chat_keeps_what_engines_inside_it_wrote(
    how: str, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_attention_by_node", lambda part, nodes: ([[None], [None], [2.0], [None]], True))
    told = generation(("The tower", 0.1), (" is", 0.2), (" old", 0.9), (".", 0.1))
    inner = built(RetrieverQueryEngine.from_args(Finds(*TEXTS), llm=Told([told])), steps)
    chat = RiskChatEngine(CondenseQuestionChatEngine.from_defaults(query_engine=inner, llm=MockLLM()))
    response: Any = await chat.achat("Who?") if how == "achat" else await asyncio.to_thread(chat.chat, "Who?")
    expected = response.sources[0].raw_output.metadata
    for key in ("spans", "claims", "edits"):
        assert response.metadata["cocoa_risk"].get(key) == expected["cocoa_risk"].get(key)
    assert response.metadata.get("cocoa_citations") == expected.get("cocoa_citations")
    edited_answers.assert_offsets_follow(response.response, response.metadata["cocoa_risk"]["spans"])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(edited_answers.SPANS.filter(lambda spans: any(text.strip() for text, _ in spans)), min_size=3, max_size=3),
    edited_answers.VALUES,
    st.lists(st.sampled_from(["cite", "mark", "mark more", "redact", "report"]), max_size=3),
)
@pytest.mark.filterwarnings("ignore::cocoa_integrations.llama_index.MissingRiskWarning")
def test_answers_in_one_text_change_as_they_do_alone(spans: Any, values: Any, steps: Any) -> None:
    """No marker of an answer stands in another one, or behind what separates them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_attention_by_node", lambda part, nodes: ([values[n] for n in part.numbers], True))
        together = asked(ResponseMode.ACCUMULATE, spans, steps, strip=False)
        alone = [asked(ResponseMode.COMPACT, [of_one], steps, strip=False) for of_one in spans]
    if together.metadata["cocoa_risk"] is None or any(one.metadata["cocoa_risk"] is None for one in alone):
        return
    shown = [f"Response {number}: {response}" for number, response in enumerate(alone, 1)]
    assert str(together) == "\n---------------------\n".join(shown)


@pytest.mark.parametrize(("count", "is_part"), [(7, False), (8, True)])
def test_a_part_of_a_split_node_is_a_run_of_its_words(count: int, is_part: bool) -> None:
    words = [f"w{number}" for number in range(20)]
    assert (
        shares_a_run(f"Context: {' '.join(words[3 : 3 + count])} Question", ["Another node", " ".join(words)])
        == is_part
    )
