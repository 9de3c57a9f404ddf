"""Both adapters retrieve more and ask again while an answer is risky."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.load import dumps
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.retrievers.bm25 import BM25Retriever
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.errors import HallucinationRiskError
from cocoa_integrations._shared.tries import Try
from cocoa_integrations.langchain import ChatCocoa, get_risk, get_risk_callback, with_risk_retry
from cocoa_integrations.langchain.retry import top_k_of, with_top_k
from cocoa_integrations.llama_index import CocoaLLM, RiskRetryQueryEngine, collect_risk
from tests.helpers.alike import near, to_dicts, without_run
from tests.helpers.llama_index_helpers import Finds, answered
from tests.helpers.reasoning_models import PLAIN
from tests.helpers.tiny_models import endless_tokenizer, tiny_model

QUESTION = "Who is the red one, and does it rain?"
TEXTS = ("the red one", "a loaf is nine", "it does rain", "no", "yes and no")
DOCUMENTS = [Document(text) for text in TEXTS]
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
OF_LANGCHAIN, OF_LLAMA_INDEX = ["invoke", "ainvoke", "batch", "abatch", "astream"], ["query", "aquery", "chat"]
EVERY_WAY = pytest.mark.parametrize("how", OF_LANGCHAIN + OF_LLAMA_INDEX)
EACH = pytest.mark.parametrize("how", ["invoke", "query"])


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    """No answer ends by itself."""
    tokenizer, model = endless_tokenizer(), tiny_model("llama", seed=10, max_position_embeddings=8192)
    tokenizer.chat_template = PLAIN
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return CocoaEngine(model, tokenizer, model_name="quick")


def model_here(how: str, engine: CocoaEngine) -> Any:
    return (CocoaLLM if how in OF_LLAMA_INDEX else ChatCocoa)(engine=engine, max_tokens=8, risk_metadata="full")


@pytest.fixture(params=["here", "remote"])
def model_of(request: pytest.FixtureRequest, engine: CocoaEngine) -> Callable[[str], Any]:
    if request.param == "here":
        return lambda how: model_here(how, engine)
    options: dict[str, Any] = {"base_url": request.getfixturevalue("url"), "timeout": 60, "risk_metadata": "full"}
    return lambda how: (CocoaLLM if how in OF_LLAMA_INDEX else ChatCocoa)(max_tokens=8, **options)


class Listed(BaseRetriever):
    """The first documents of a list."""

    k: int = 2

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return DOCUMENTS[: self.k]


def retriever_of(how: str, count: int = 2) -> Any:
    if how in OF_LANGCHAIN:
        return Listed(k=count)
    return BM25Retriever.from_defaults(nodes=[TextNode(text=text, id_=text) for text in TEXTS], similarity_top_k=count)


async def called(chain: Any, how: str) -> AIMessage:
    if "batch" in how:
        asked = [QUESTION, "And who else?"]
        return (await (chain.abatch(asked) if how == "abatch" else asyncio.to_thread(chain.batch, asked)))[0]
    if how == "astream":
        return [chunk async for chunk in chain.astream(QUESTION)][-1]
    return await (
        chain.ainvoke({"question": QUESTION}) if how == "ainvoke" else asyncio.to_thread(chain.invoke, QUESTION)
    )


class Retried(NamedTuple):
    """An answer, its report, its attempts, and how many sources it has if that is known."""

    text: str
    report: dict[str, Any]
    tries: list[dict[str, Any]]
    sources: int | None = None

    @property
    def best(self) -> dict[str, Any]:
        return min(self.tries, key=lambda entry: entry["risk"])


async def retried(how: str, model: Any, retriever: Any = None, threshold: float = 0.0, **options: Any) -> Retried:
    """By default no answer is good enough."""
    retriever = retriever or retriever_of(how)
    if how in OF_LANGCHAIN:
        message = await called(with_risk_retry(retriever, PROMPT, model, threshold=threshold, **options), how)
        assert "cocoa_tries" in dumps(message)  # plain values
        return Retried(message.text, get_risk(message).to_dict(), message.response_metadata["cocoa_tries"])
    engine: Any = RiskRetryQueryEngine(retriever, model, threshold=threshold, **options)
    if how == "chat":
        chats = CondenseQuestionChatEngine.from_defaults(query_engine=engine, llm=MockLLM())
        response = (await chats.achat(QUESTION)).sources[0].raw_output
    else:
        _, response = await answered(engine, how, QUESTION)
    metadata = response.metadata
    return Retried(str(response), metadata["cocoa_risk"], metadata["cocoa_tries"], len(response.source_nodes))


def counts(tries: list[dict[str, Any]]) -> list[int]:
    return [entry.get("documents", entry.get("source_nodes")) for entry in tries]


@EVERY_WAY
async def test_retry(how: str, model_of: Callable[[str], Any]) -> None:
    model, retriever = model_of(how), retriever_of(how)
    before = (dict(vars(retriever)), model.model_dump() if how in OF_LANGCHAIN else model.to_dict())
    with get_risk_callback() as seen, collect_risk() as collected:
        shown = await retried(how, model, retriever)
    tries = shown.tries
    TypeAdapter(list[Try]).validate_python(tries)
    assert [entry["alpha"] for entry in tries] == [2.5, 5.0, 10.0]
    assert [entry["settings"] for entry in tries] == [{}, {"alpha": 5.0}, {"alpha": 10.0}]
    assert [entry["top_k"] for entry in tries] == [2, 4, 8 if how in OF_LANGCHAIN else 5]  # as many as BM25 has
    assert counts(tries) == [2, 4, 5]
    assert [entry["risk"] for entry in tries] == [entry["cocoa_risk"]["max_risk"] for entry in tries]
    reports = to_dicts(collected) if how in OF_LLAMA_INDEX else without_run(seen.reports)
    assert all(entry["cocoa_risk"] in reports for entry in tries)
    (chosen,) = [entry for entry in tries if entry["chosen"]]
    assert chosen["risk"] == min(entry["risk"] for entry in tries)
    assert (chosen["answer"], chosen["cocoa_risk"]) == (shown.text, shown.report)
    assert shown.sources in (None, *counts([chosen]))
    assert (dict(vars(retriever)), model.model_dump() if how in OF_LANGCHAIN else model.to_dict()) == before


@EACH
async def test_an_attempt_is_the_plain_chain_with_its_sources_and_settings(
    how: str, model_of: Callable[[str], Any]
) -> None:
    model, greedy, expected = model_of(how), {"method": "greedy"}, []
    tries = (await retried(how, model, settings=[greedy])).tries
    for count, options in ((2, {}), (4, greedy), (5, greedy)):
        if how == "query":
            llm = model.model_copy(update=options)
            expected.append(str(RetrieverQueryEngine.from_args(retriever_of(how, count), llm=llm).query(QUESTION)))
        else:
            prompt = PROMPT.invoke({"context": "\n\n".join(TEXTS[:count]), "question": QUESTION})
            expected.append(model.invoke(prompt, **options).text)
    assert [entry["answer"] for entry in tries] == expected
    assert len(set(expected)) == 3
    tries = (await retried(how, model, alphas=[4.0])).tries
    assert [entry["settings"] for entry in tries] == [{}, {"alpha": 4.0}, {"alpha": 4.0}]


@EACH
async def test_it_stops_at_a_good_answer(how: str, engine: CocoaEngine) -> None:
    model, options = model_here(how, engine), {"measure": "mean_risk"}
    shown = await retried(how, model, threshold=1.0, **options)
    (only,) = shown.tries
    assert (only["chosen"], only["alpha"], only["risk"]) == (True, 2.5, only["cocoa_risk"]["mean_risk"])
    for change, count in ((0.01, 1), (-0.01, 2)):
        tries = (await retried(how, model, threshold=only["risk"] + change, max_tries=2, **options)).tries
        assert (len(tries), tries[0]["risk"]) == (count, near(only["risk"]))


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "query", "aquery"])
async def test_other_settings_and_a_second_retriever(how: str, model_of: Callable[[str], Any]) -> None:
    steps = [{"method": "greedy"}, {"max_tokens": 1, "alpha": 4}]
    options = {"response_mode": "simple_summarize"} if how in OF_LLAMA_INDEX else {}
    second = retriever_of(how, 3)
    tries = (await retried(how, model_of(how), settings=steps, second_retriever=second, **options)).tries
    TypeAdapter(list[Try]).validate_python(tries)
    assert [entry["settings"] for entry in tries] == [{}, *steps]
    assert [entry["alpha"] for entry in tries] == [2.5, 2.5, 4.0]
    assert [entry["cocoa_risk"]["method"] for entry in tries] == ["cocoa-sig", "greedy", "cocoa-sig"]
    assert [entry["top_k"] for entry in tries] == [2, 2, 2]
    assert counts(tries) == [2, 3, 3]  # the two that both found are there once
    assert len(tries[2]["cocoa_risk"]["spans"]) == 1 < len(tries[1]["cocoa_risk"]["spans"])


@EVERY_WAY
async def test_it_refuses(how: str, model_of: Callable[[str], Any]) -> None:
    model = model_of(how)

    async def tried(threshold: float = 0.0, **options: Any) -> Retried:
        return await retried(how, model, threshold=threshold, max_tries=2, **options)

    shown = await tried()
    assert (shown.text, "gate" in shown.report) == (shown.best["answer"], False)
    said, own = await tried(on_risk="abstain"), await tried(on_risk="abstain", answer="Ask a person.")
    assert (said.text, own.text) == ("I don't know.", "Ask a person.")
    gate = {"action": "abstain", "metric": "max_risk", "threshold": 0.0, "value": said.best["risk"]}
    assert said.report["gate"] == gate
    assert "".join(span["text"] for span in said.report["spans"]) == said.best["answer"]
    assert said.sources in (None, *counts([said.best]))
    marked = await tried(on_risk="mark", mark="<{text}>")
    assert ("<" in marked.text) == any(map(str.isalnum, shown.text))  # marks stand around words
    assert marked.text.replace("<", "").replace(">", "") == shown.text
    passed = await tried(threshold=1.0, on_risk="abstain")
    assert (passed.text, len(passed.tries), "gate" in passed.report) == (passed.best["answer"], 1, False)
    if how != "chat":  # that of LlamaIndex raises nothing that its query engine raised
        with pytest.raises(HallucinationRiskError, match="least risky of 2 answers has a max_risk of") as error:
            await tried(on_risk="raise")
        report = error.value.report
        assert (error.value.threshold, error.value.value) == (0.0, report.max_risk)
        if "batch" not in how:  # whose other answer may be the first to raise
            assert error.value.value == near(shown.best["risk"])
            assert "".join(span.text or "" for span in report.spans) == shown.best["answer"]


def test_other_names_in_the_prompt_and_what_comes_back(engine: CocoaEngine) -> None:
    chain = with_risk_retry(
        Listed(k=1),
        ChatPromptTemplate.from_template("{style}: {given}\n{asked}"),
        model_here("invoke", engine),
        threshold=0.0,
        second_retriever=RunnableLambda(lambda question: [DOCUMENTS[0], DOCUMENTS[4]]),
        question="asked",
        context="given",
        return_documents=True,
    )
    result = chain.invoke({"asked": QUESTION, "style": "short"}, max_tokens=4)
    tries = result["answer"].response_metadata["cocoa_tries"]
    assert counts(tries) == [1, 2, 2]  # the one that both found is there once
    assert result["given"] == (DOCUMENTS[:1] if tries[0]["chosen"] else [DOCUMENTS[0], DOCUMENTS[4]])
    assert (result["asked"], result["style"]) == (QUESTION, "short")
    assert result["answer"].usage_metadata["output_tokens"] <= 4
    plain = with_risk_retry(Listed(), PROMPT, model_here("invoke", engine), threshold=1.0)
    assert isinstance((plain | StrOutputParser()).invoke("a"), str)
    with pytest.raises(ConfigError, match="needs a text under 'question'"):
        plain.invoke({"query": QUESTION})


def test_a_vector_store_returns_more() -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    store.add_documents([Document(str(number)) for number in range(12)])
    few, default = store.as_retriever(search_kwargs={"k": 2}), store.as_retriever()
    diverse = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 3})
    for retriever, factor, count in ((few, 3, 6), (default, 2, 8), (diverse, 3, 6)):
        assert len(with_top_k(retriever, factor).invoke(QUESTION)) == count
    assert (len(few.invoke(QUESTION)), top_k_of(default)) == (2, 4)


BOTH, LANGCHAIN, LLAMA_INDEX = ["invoke", "query"], ["invoke"], ["query"]
BAD: list[tuple[list[str], dict[str, Any], str]] = [
    (BOTH, {"retriever": None}, "retriever (takes a runnable|must be a BaseRetriever), not a NoneType"),
    (BOTH, {"max_tries": 0}, "max_tries: .* greater than or equal to 1"),
    (BOTH, {"top_k_growth": 0.5}, "top_k_growth: .* greater than or equal to 1"),
    (BOTH, {"settings": {"alpha": 3.0}}, "settings: .* Sequence"),
    (BOTH, {"settings": [{"alhpa": 3.0}]}, "unknown option 'alhpa'"),
    (BOTH, {"settings": [{}], "top_k_growth": 1}, "every attempt would be the same"),
    (BOTH, {"alphas": [2.5], "top_k_growth": 1}, "every attempt would be the same"),
    (BOTH, {"settings": [{"alpha": 3.0}], "alphas": [3.0]}, "both given"),
    (LANGCHAIN, {"retriever": RunnableLambda(lambda question: DOCUMENTS)}, "no number of documents to increase"),
    (LANGCHAIN, {"chat": StrOutputParser()}, "takes a ChatCocoa, not a StrOutputParser"),
    (LLAMA_INDEX, {"retriever": Finds()}, "no number of documents to increase"),
    (LLAMA_INDEX, {"llm": MockLLM()}, "llm must be a CocoaLLM, not a MockLLM"),
    (LLAMA_INDEX, {"second_retriever": "x"}, "second_retriever must be a BaseRetriever"),
    (LLAMA_INDEX, {"nonsense": 1}, "unknown option 'nonsense'"),
    (LLAMA_INDEX, {"topk_growth": 3}, "did you mean 'top_k_growth'"),
    (LLAMA_INDEX, {"alpha": 3.0}, "did you mean 'alphas'"),
    (LLAMA_INDEX, {"response_synthesizer": object()}, "has its own LLM"),
]


@pytest.mark.parametrize(("how", "changes", "words"), [(how, *row) for ways, *row in BAD for how in ways])
def test_bad_arguments(how: str, changes: dict[str, Any], words: str, engine: CocoaEngine) -> None:
    model = model_here(how, engine)
    parts = {"llm": model} if how == "query" else {"prompt": PROMPT, "chat": model}
    make: Any = RiskRetryQueryEngine if how == "query" else with_risk_retry
    with pytest.raises(ConfigError, match=words):
        make(**{"retriever": retriever_of(how), "threshold": 0.5, **parts, **changes})


@EACH
@pytest.mark.parametrize("settings", [None, [{"alpha": 0.0}], [{"alpha": 0}, {"max_tokens": 8}]])
async def test_settings_that_change_nothing(how: str, settings: Any, engine: CocoaEngine) -> None:
    model = model_here(how, engine)
    model.alpha = 0.0
    with pytest.raises(ConfigError, match="every attempt would be the same"):
        await retried(how, model, settings=settings, top_k_growth=1)
    await retried(how, model, settings=[{"alpha": 1.0}], top_k_growth=1)
