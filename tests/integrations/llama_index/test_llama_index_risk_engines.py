"""Query and chat engines that bring the risk of their answers along, over a BM25 index of the examples' corpus."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from llama_index.core import Document
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.retrievers.bm25 import BM25Retriever
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.errors import HallucinationRiskError
from cocoa_integrations._shared.tries import Try
from cocoa_integrations.llama_index import (
    CocoaLLM,
    CocoaRiskEvent,
    MissingRiskWarning,
    RiskChatEngine,
    RiskCitationQueryEngine,
    RiskQueryEngine,
    RiskRetryQueryEngine,
    collect_risk,
)
from cocoa_integrations.llama_index.retrieved import WithoutNodes
from tests.helpers.alike import near
from tests.helpers.llama_index_helpers import Listener, Script, answered
from tests.helpers.paths import CORPUS
from tests.helpers.reports import stand_in, to_dicts, without_markers

QUESTION = "Who built the lighthouse, and in which year?"


@pytest.fixture(scope="module")
def nodes() -> list[Any]:
    documents = [Document(text=path.read_text(), metadata={"file": path.name}) for path in sorted(CORPUS.glob("*.md"))]
    return SentenceSplitter(chunk_size=128, chunk_overlap=0).get_nodes_from_documents(documents)


@pytest.fixture(scope="module")
def retriever(nodes: list[Any]) -> BM25Retriever:
    return BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=2)


def text_of(report: dict[str, Any]) -> str:
    return "".join(span["text"] for span in report["spans"])


@pytest.mark.also_remote
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["query", "aquery"])
async def test_query_engine(how: str, streaming: bool, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=streaming)
    with collect_risk() as reports:
        text, response = await answered(RiskQueryEngine(inner), how, QUESTION)
    expected = {False: Response, True: AsyncStreamingResponse if how == "aquery" else StreamingResponse}[streaming]
    assert isinstance(response, expected)
    assert response.metadata["cocoa_risk"] == reports[-1].to_dict()
    assert response.metadata["cocoa_reports"] == to_dicts(reports)
    assert text == text_of(response.metadata["cocoa_risk"]) != ""
    assert len(response.metadata["cocoa_risk"]["spans"]) > 1
    assert "lighthouse" in response.source_nodes[0].text
    assert response.source_nodes[0].node_id in response.metadata  # LlamaIndex's own: the metadata of each node
    assert "context_lift" not in response.metadata["cocoa_risk"]["spans"][0]


@pytest.mark.also_remote
@pytest.mark.parametrize(
    ("mode", "streaming"),
    [(ResponseMode.COMPACT, False), (ResponseMode.REFINE, True), (ResponseMode.ACCUMULATE, False)],
)
async def test_the_retrieved_nodes_are_the_passages(
    mode: ResponseMode, streaming: bool, llm: CocoaLLM, retriever: BM25Retriever
) -> None:
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, streaming=streaming)
    _, response = await answered(RiskQueryEngine(inner), "query" if streaming else "aquery", QUESTION)
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
    response = RiskQueryEngine(inner).query(QUESTION)
    first, _, last = (node.node_id for node in retriever.retrieve(QUESTION))
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
    found = list(reversed(retriever.retrieve(QUESTION)))
    response = engine.synthesize(QueryBundle(QUESTION), found)
    assert all(None not in one["passage_attention"] for one in response.metadata["cocoa_risk"]["spans"])  # type: ignore[index]
    with collect_risk() as reports:
        llm.complete("The lighthouse is old, and ")
        RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)  # nothing collects its nodes
    assert not any(span.passage_attention for report in reports for span in report.spans)


async def test_a_stream_has_its_risk_at_its_end_only(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=True)
    stream = RiskQueryEngine(inner).query(QUESTION)
    assert isinstance(stream, StreamingResponse)
    first = next(stream.response_gen)
    assert stream.metadata is not None
    assert stream.metadata["cocoa_risk"] is None
    whole = stream.get_response()
    assert first + (whole.response or "") == text_of(whole.metadata["cocoa_risk"])  # type: ignore[index]
    broken_off = RiskQueryEngine(inner).query(QUESTION)
    assert isinstance(broken_off, StreamingResponse)
    next(broken_off.response_gen)
    broken_off.response_gen.close()
    assert broken_off.metadata == {**(broken_off.metadata or {}), "cocoa_risk": None, "cocoa_reports": []}


class NothingFound(BaseRetriever):
    """Finds nothing."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return []


async def test_an_answer_without_a_report_is_kept(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    other = RiskQueryEngine(RetrieverQueryEngine.from_args(retriever, llm=MockLLM()))
    nothing = RiskQueryEngine(RetrieverQueryEngine.from_args(NothingFound(), llm=llm))
    for engine, how in ((other, "query"), (other, "aquery"), (nothing, "query")):
        with pytest.warns(MissingRiskWarning, match="no CocoaLLM generated it"):
            text, response = await answered(engine, how, QUESTION)
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
    engine = RiskChatEngine(kind.from_defaults(retriever=retriever, llm=llm), context_lift=True)
    texts = []
    for number, question in enumerate((QUESTION, "How high is it?")):
        text, response = await answered(engine, how, question)
        metadata = response.metadata
        assert text.strip() == text_of(metadata["cocoa_risk"]).strip() != ""
        # CondensePlusContext first asks the model to rewrite the second question
        assert len(metadata["cocoa_reports"]) == (2 if kind is CondensePlusContextChatEngine and number else 1)
        assert len(response.source_nodes) == 2
        assert all(isinstance(span["context_lift"], float) for span in metadata["cocoa_risk"]["spans"])
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
    cited = RiskCitationQueryEngine(inner, by="attention", min_attention=0.0)
    chat = RiskChatEngine(CondenseQuestionChatEngine.from_defaults(query_engine=cited, llm=MockLLM()))
    text, response = await answered(chat, how, QUESTION)
    citations = response.metadata["cocoa_citations"]
    assert citations == response.sources[0].raw_output.metadata["cocoa_citations"] != []
    assert all(text[one["start"] : one["end"]] == one["text"] for one in citations)


@pytest.mark.parametrize(("how", "streaming"), [("query", False), ("aquery", True)])
async def test_context_lift(how: str, streaming: bool, block_engine: CocoaEngine, retriever: BM25Retriever) -> None:
    """What the answer takes from its sources is lifted; the figures are those of plain scores."""
    said = "The lighthouse was built by Ingrid Solheim, and penguins like jazz."

    script = Script(block_engine, lambda _: said)
    scripted = CocoaLLM(engine=block_engine, max_new_tokens=24, generate_kwargs={"logits_processor": script})
    template = PromptTemplate("Context: {context_str}\nQuestion: {query_str}\nAnswer:")
    inner = RetrieverQueryEngine.from_args(retriever, llm=scripted, streaming=streaming, text_qa_template=template)
    text, response = await answered(RiskQueryEngine(inner, context_lift=True), how, QUESTION)
    assert text == said
    (span,) = response.metadata["cocoa_risk"]["spans"]
    context = "\n\n".join(node.get_content("llm").strip() for node in response.source_nodes)
    engine, figures = block_engine, []
    for given in (context, "\n\n"):
        prompt = engine.encode_chat([{"role": "user", "content": f"Context: {given}\nQuestion: {QUESTION}\nAnswer:"}])
        ids = [*engine.encode(said, add_special_tokens=False), engine.tokenizer.eos_token_id]
        figures.append(engine.score(prompt, ids).spans[0])
    full, bare = figures
    assert span["context_lift"] == pytest.approx(full.log_prob - bare.log_prob, abs=1e-2)
    assert span["f_mlds_lift"] == near(full.f_mlds - bare.f_mlds)
    assert span["con_mlds_lift"] == near(full.con_mlds - bare.con_mlds)


def test_no_lift_where_no_node_is_in_the_prompt(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    template = PromptTemplate("Question: {query_str}\nAnswer:")
    inner = RetrieverQueryEngine.from_args(retriever, llm=llm, text_qa_template=template)
    with pytest.warns(MissingRiskWarning, match="contains no text of the source nodes"):
        response = RiskQueryEngine(inner, context_lift=True).query(QUESTION)
    assert "context_lift" not in response.metadata["cocoa_risk"]["spans"][0]  # type: ignore[index]


def test_nodes_are_cut_out_of_a_prompt() -> None:
    long = "one two three four five six seven eight nine ten eleven twelve"
    found = [
        NodeWithScore(node=TextNode(text="The tower is red.")),
        NodeWithScore(node=TextNode(text="The tower is red. It is old.", metadata={"file": "a.md"})),
        NodeWithScore(node=TextNode(text=long)),
        NodeWithScore(node=TextNode(text="   ")),
    ]
    without = WithoutNodes(found)
    assert without("No context here.") == "No context here."
    assert not without.found
    prompt = "file: a.md\n\nThe tower is red. It is old.\n\nThe tower is red.\n\nWhy is it so: The tower is red."
    assert without(prompt) == "\n\n\n\nWhy is it so: The tower is red."
    assert without.found
    assert without("The tower is red.") == "The tower is red."  # a later turn that quotes it
    assert without(f"begin\n{long[:48]}\n-- the rest is elsewhere") == "begin\n\n-- the rest is elsewhere"
    assert without("one two three four") == "one two three four"
    child, parent = (WithoutNodes(found, only=number) for number in range(2))
    assert parent(prompt) == "\n\nThe tower is red.\n\nWhy is it so: The tower is red."
    assert child("The tower is red. It is old.\n\n The tower is red.") == "The tower is red. It is old.\n\n "


@pytest.mark.also_remote
@pytest.mark.parametrize("how", ["query", "aquery"])
async def test_retry(how: str, llm: CocoaLLM, retriever: BM25Retriever, prompts: list[str]) -> None:
    before = (copy.copy(vars(retriever)), llm.to_dict())
    engine = RiskRetryQueryEngine(retriever, llm, threshold=0.0)  # nothing is that good
    text, response = await answered(engine, how, QUESTION)
    tries = response.metadata["cocoa_tries"]
    assert [one["alpha"] for one in tries] == [2.5, 5.0, 10.0]
    assert [one["top_k"] for one in tries] == [2, 4, 5]  # BM25 looks for no more nodes than there are
    assert [one["source_nodes"] for one in tries] == [2, 4, 5]
    assert len(prompts) == 3
    assert len(prompts[0]) < len(prompts[1]) < len(prompts[2])
    assert [one["cocoa_risk"]["max_risk"] for one in tries] == [one["risk"] for one in tries]
    (chosen,) = [one for one in tries if one["chosen"]]
    assert chosen["risk"] == min(one["risk"] for one in tries)
    assert (chosen["answer"], chosen["cocoa_risk"]) == (text, response.metadata["cocoa_risk"])
    assert len(response.source_nodes) == chosen["source_nodes"]
    assert (vars(retriever), llm.to_dict()) == before


def test_retry_stops_at_a_good_answer(llm: CocoaLLM, retriever: BM25Retriever, prompts: list[str]) -> None:
    plain = RiskQueryEngine(RetrieverQueryEngine.from_args(retriever, llm=llm)).query(QUESTION).metadata
    assert plain is not None
    del prompts[:]
    mean = plain["cocoa_risk"]["mean_risk"]
    options: dict[str, Any] = {"max_tries": 2, "measure": "mean_risk"}
    response = RiskRetryQueryEngine(retriever, llm, threshold=mean + 0.01, context_lift=True, **options).query(QUESTION)
    assert len(prompts) == 1 + 2  # and the prompts of the lift, which are only encoded
    assert response.metadata is not None
    (only,) = response.metadata["cocoa_tries"]
    assert (only["alpha"], only["risk"], only["chosen"]) == (2.5, near(mean), True)
    assert "context_lift" in response.metadata["cocoa_risk"]["spans"][0]
    reached = RiskRetryQueryEngine(retriever, llm, threshold=mean - 0.01, **options).query(QUESTION)
    assert len(reached.metadata["cocoa_tries"]) == 2  # type: ignore[index]


@pytest.mark.also_remote
async def test_retry_with_other_settings_and_a_second_retriever(
    llm: CocoaLLM, retriever: BM25Retriever, nodes: list[Any]
) -> None:
    second = BM25Retriever.from_defaults(nodes=nodes, similarity_top_k=3)
    steps = [{"method": "greedy"}, {"max_tokens": 1, "alpha": 4}]
    options: dict[str, Any] = {"settings": steps, "second_retriever": second, "response_mode": "simple_summarize"}
    engine = RiskRetryQueryEngine(retriever, llm, threshold=0.0, **options)
    for how in ("query", "aquery"):
        _, response = await answered(engine, how, QUESTION)
        tries = response.metadata["cocoa_tries"]
        TypeAdapter(list[Try]).validate_python(tries)
        assert [one["settings"] for one in tries] == [{}, *steps]
        assert [one["alpha"] for one in tries] == [2.5, 2.5, 4.0]
        assert [one["cocoa_risk"]["method"] for one in tries] == ["cocoa-sig", "greedy", "cocoa-sig"]
        assert [one["top_k"] for one in tries] == [2, 2, 2]
        assert [one["source_nodes"] for one in tries] == [2, 3, 3]  # the two that both found are there once
        assert len(tries[2]["answer"]) < len(tries[1]["answer"])


async def refused_by(engine: Any, how: str) -> Any:
    if how == "chat":
        chats = CondenseQuestionChatEngine.from_defaults(query_engine=engine, llm=MockLLM())
        return (await chats.achat(QUESTION)).sources[0].raw_output
    return (await answered(engine, how, QUESTION))[1]


@pytest.mark.also_remote
@pytest.mark.parametrize("how", ["query", "aquery", "chat"])
async def test_retry_refuses(how: str, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    def engine(threshold: float = 0.0, **options: Any) -> RiskRetryQueryEngine:
        return RiskRetryQueryEngine(retriever, llm, threshold=threshold, max_tries=2, **options)

    kept = await refused_by(engine(), how)
    assert "gate" not in kept.metadata["cocoa_risk"]
    best = min(kept.metadata["cocoa_tries"], key=lambda one: one["risk"])
    said = await refused_by(engine(on_risk="abstain"), how)
    own = await refused_by(engine(on_risk="abstain", answer="Ask a person."), how)
    assert (str(said), str(own)) == ("I don't know.", "Ask a person.")
    gate = {"action": "abstain", "metric": "max_risk", "threshold": 0.0, "value": near(best["risk"])}
    assert said.metadata["cocoa_risk"]["gate"] == gate
    assert text_of(said.metadata["cocoa_risk"]) == best["answer"]
    assert len(said.source_nodes) == best["source_nodes"]
    marked = await refused_by(engine(on_risk="mark", mark="<{text}>"), how)
    assert ("<" in str(marked)) == any(map(str.isalnum, str(kept)))  # marks stand around words
    assert str(marked).replace("<", "").replace(">", "") == str(kept)
    passed = await refused_by(engine(threshold=1.0, on_risk="abstain"), how)
    assert (len(passed.metadata["cocoa_tries"]), "gate" in passed.metadata["cocoa_risk"]) == (1, False)
    if how != "chat":  # that of LlamaIndex raises nothing that its query engine raised
        with pytest.raises(HallucinationRiskError, match="least risky of 2 answers has a max_risk of") as error:
            await refused_by(engine(on_risk="raise"), how)
        assert (error.value.value, error.value.threshold) == (near(best["risk"]), 0.0)
        assert text_of(error.value.report.to_dict()) == best["answer"]


@pytest.mark.also_remote
@pytest.mark.parametrize(("how", "mode"), [("query", "compact"), ("aquery", "accumulate")])
async def test_a_retry_streams_the_answer_that_it_returns(
    how: str, mode: str, llm: CocoaLLM, retriever: BM25Retriever
) -> None:
    def engine(**options: Any) -> RiskRetryQueryEngine:
        options = {"threshold": 0.0, "max_tries": 2, "mark": "<{text}>", "response_mode": mode, **options}
        return RiskRetryQueryEngine(retriever, llm, **options)

    for on_risk in ("keep", "mark", "abstain"):
        text, response = await answered(engine(on_risk=on_risk), how, QUESTION)
        streamed, stream = await answered(engine(on_risk=on_risk, streaming=True), how, QUESTION)
        assert isinstance(stream, AsyncStreamingResponse if how == "aquery" else StreamingResponse)
        assert streamed == text
        assert stream.metadata.keys() == response.metadata.keys()
        assert stream.metadata["cocoa_risk"].get("gate", {}).get("action") == (None if on_risk == "keep" else on_risk)
        assert len(stream.metadata["cocoa_tries"]) == len(response.metadata["cocoa_tries"])
    with pytest.raises(HallucinationRiskError):
        await answered(engine(on_risk="raise", streaming=True), how, QUESTION)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llm": MockLLM()}, "llm must be a CocoaLLM, not a MockLLM"),
        ({"retriever": None}, "retriever must be a BaseRetriever, not a NoneType"),
        ({"retriever": NothingFound()}, "no number of documents to increase"),
        ({"second_retriever": "x"}, "second_retriever must be a BaseRetriever"),
        ({"max_tries": 0}, "max_tries: .* greater than or equal to 1"),
        ({"alphas": [2.5], "top_k_growth": 1}, "every attempt would be the same"),
        ({"nonsense": 1}, "unknown option 'nonsense'"),
        ({"topk_growth": 3}, "did you mean 'top_k_growth'"),
        ({"alpha": 3.0}, "did you mean 'alphas'"),
        ({"settings": [{"alhpa": 3.0}]}, "settings: unknown option 'alhpa'"),
        ({"response_synthesizer": object()}, "has its own LLM"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], words: str, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    arguments: dict[str, Any] = {"retriever": retriever, "llm": llm, "threshold": 0.5, **changes}
    with pytest.raises(ConfigError, match=words):
        RiskRetryQueryEngine(**arguments)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_retried_response_is_cited(streaming: bool, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    def engine(**options: Any) -> RiskCitationQueryEngine:
        options = {"threshold": 0.0, "max_tries": 2, "streaming": streaming, **options}
        return RiskCitationQueryEngine(RiskRetryQueryEngine(retriever, llm, **options), min_attention=0.0)

    kept, response = await answered(engine(), "query", QUESTION)
    (answer,) = [one["answer"] for one in response.metadata["cocoa_tries"] if one["chosen"]]
    assert without_markers(kept) == answer
    assert kept == answer or not streaming  # a stream has no markers
    assert stand_in(kept, response.metadata["cocoa_citations"])
    assert response.metadata["cocoa_citations"]
    said, of_said = await answered(engine(on_risk="abstain"), "query", QUESTION)
    assert (said, of_said.metadata["cocoa_citations"]) == ("I don't know.", [])


def test_a_refusal_without_nodes_and_a_retry_that_finds_some(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    def engine(**options: Any) -> RiskRetryQueryEngine:
        return RiskRetryQueryEngine(NothingFound(), llm, **options)

    with pytest.warns(MissingRiskWarning):
        assert str(engine(max_tries=1, on_risk="abstain").query(QUESTION)) == "I don't know."
    with pytest.warns(MissingRiskWarning), pytest.raises(HallucinationRiskError, match="has no report"):
        engine(max_tries=1, on_risk="raise").query(QUESTION)
    with pytest.warns(MissingRiskWarning):
        response = engine(threshold=1.0, second_retriever=retriever).query(QUESTION)
    first, second = response.metadata["cocoa_tries"]  # type: ignore[index]
    assert (first["risk"], first["source_nodes"], first["chosen"]) == (None, 0, False)
    assert (second["source_nodes"], second["chosen"], second["answer"]) == (2, True, str(response))


def test_only_engines_can_be_wrapped(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    with pytest.raises(ConfigError, match="wraps a query engine, not a BM25Retriever"):
        RiskQueryEngine(retriever)
    with pytest.raises(ConfigError, match="wraps a chat engine, not a RetrieverQueryEngine"):
        RiskChatEngine(RetrieverQueryEngine.from_args(retriever, llm=llm))  # type: ignore[arg-type]
