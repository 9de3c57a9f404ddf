"""A chain that retrieves more and asks again while its answer is risky."""

from __future__ import annotations

import asyncio
from typing import Any, cast

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
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.errors import HallucinationRiskError
from cocoa_integrations._shared.tries import Try
from cocoa_integrations.langchain import ChatCocoa, get_risk, get_risk_callback, with_risk_retry
from cocoa_integrations.langchain.retry import top_k_of, with_top_k
from tests.helpers.alike import near
from tests.helpers.reports import without_run

pytestmark = pytest.mark.also_remote

QUESTION = "Who is it?"
DOCUMENTS = [Document(text) for text in ("the red one", "a loaf is nine", "it rains", "no", "yes and no")]
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")


class Listed(BaseRetriever):
    """The first documents of a list."""

    documents: list[Document]
    k: int = 1

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return self.documents[: self.k]


@pytest.fixture
def retriever() -> Listed:
    return Listed(documents=DOCUMENTS)


def risks(tries: list[dict[str, Any]]) -> list[float]:
    return [one["risk"] for one in tries]


async def called(chain: Any, how: str) -> AIMessage:
    if how == "invoke":
        return await asyncio.to_thread(chain.invoke, QUESTION)
    if how == "ainvoke":
        return await chain.ainvoke({"question": QUESTION})
    if how == "batch":
        return (await asyncio.to_thread(chain.batch, [QUESTION, "And who else?"]))[0]
    if how == "abatch":
        return (await chain.abatch([QUESTION, "And who else?"]))[0]
    return [chunk async for chunk in chain.astream(QUESTION)][-1]


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "batch", "abatch", "astream"])
async def test_retry(how: str, quick_chat: ChatCocoa, retriever: Listed) -> None:
    before = (retriever.model_dump(), quick_chat.model_dump())
    chain = with_risk_retry(retriever, PROMPT, quick_chat, threshold=0.0)  # nothing is that good
    with get_risk_callback() as seen:
        message = await called(chain, how)
    tries = message.response_metadata["cocoa_tries"]
    TypeAdapter(list[Try]).validate_python(tries)
    assert [one["alpha"] for one in tries] == [2.5, 5.0, 10.0]
    assert [one["settings"] for one in tries] == [{}, {"alpha": 5.0}, {"alpha": 10.0}]
    assert [one["top_k"] for one in tries] == [1, 2, 4]
    assert [one["documents"] for one in tries] == [1, 2, 4]
    assert risks(tries) == [one["cocoa_risk"]["max_risk"] for one in tries]
    assert all(one["cocoa_risk"] in without_run(seen.reports) for one in tries)
    (chosen,) = [one for one in tries if one["chosen"]]
    assert chosen["risk"] == min(risks(tries))
    assert (chosen["answer"], chosen["cocoa_risk"]) == (message.text, get_risk(message).to_dict())
    assert (retriever.model_dump(), quick_chat.model_dump()) == before
    assert "cocoa_tries" in dumps(message)  # plain values


def test_an_attempt_is_the_plain_chain_with_its_documents_and_settings(
    quick_chat: ChatCocoa, retriever: Listed
) -> None:
    tries = (
        with_risk_retry(retriever, PROMPT, quick_chat, threshold=0.0, settings=[{"method": "greedy"}])
        .invoke(QUESTION)
        .response_metadata["cocoa_tries"]
    )
    expected = []
    for count, options in ((1, {}), (2, {"method": "greedy"}), (4, {"method": "greedy"})):
        texts = "\n\n".join(document.page_content for document in DOCUMENTS[:count])
        prompt = PROMPT.invoke({"context": texts, "question": QUESTION})
        expected.append(quick_chat.invoke(prompt, **cast(Any, options)).text)
    assert [one["answer"] for one in tries] == expected
    assert len(set(expected)) == 3
    short = with_risk_retry(retriever, PROMPT, quick_chat, threshold=0.0, alphas=[4.0]).invoke(QUESTION)
    tries = short.response_metadata["cocoa_tries"]
    assert [one["settings"] for one in tries] == [{}, {"alpha": 4.0}, {"alpha": 4.0}]
    with pytest.raises(ConfigError, match="needs a text under 'question'"):
        with_risk_retry(retriever, PROMPT, quick_chat, threshold=0.5).invoke({"query": QUESTION})


def test_it_stops_at_a_good_answer(quick_chat: ChatCocoa, retriever: Listed) -> None:
    chain = with_risk_retry(retriever, PROMPT, quick_chat, threshold=1.0, measure="mean_risk")
    (only,) = chain.invoke(QUESTION).response_metadata["cocoa_tries"]
    assert (only["chosen"], only["risk"]) == (True, only["cocoa_risk"]["mean_risk"])
    options: dict[str, Any] = {"measure": "mean_risk", "max_tries": 2}
    passes = with_risk_retry(retriever, PROMPT, quick_chat, threshold=only["risk"] + 0.01, **options)
    (same,) = passes.invoke(QUESTION).response_metadata["cocoa_tries"]
    assert same["risk"] == near(only["risk"])
    reached = with_risk_retry(retriever, PROMPT, quick_chat, threshold=only["risk"] - 0.01, **options)
    assert len(reached.invoke(QUESTION).response_metadata["cocoa_tries"]) == 2


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "batch", "abatch", "astream"])
async def test_it_refuses(how: str, quick_chat: ChatCocoa, retriever: Listed) -> None:
    async def tried(threshold: float = 0.0, **options: Any) -> tuple[AIMessage, dict[str, Any]]:
        chain = with_risk_retry(retriever, PROMPT, quick_chat, threshold=threshold, max_tries=2, **options)
        message = await called(chain, how)
        return message, min(message.response_metadata["cocoa_tries"], key=lambda one: one["risk"])

    kept, best = await tried()
    assert (kept.text, "gate" in get_risk(kept).to_dict()) == (best["answer"], False)
    said, best = await tried(on_risk="abstain")
    assert said.text == "I don't know."
    assert get_risk(said).to_dict()["gate"] == {
        "action": "abstain",
        "metric": "max_risk",
        "threshold": 0.0,
        "value": best["risk"],
    }
    assert "".join(span["text"] for span in get_risk(said).to_dict()["spans"]) == best["answer"]
    assert (await tried(on_risk="abstain", answer="Ask a person."))[0].text == "Ask a person."
    marked, best = await tried(on_risk="mark", mark="<{text}>")
    assert ("<" in marked.text) == any(map(str.isalnum, best["answer"]))  # marks stand around words
    assert marked.text.replace("<", "").replace(">", "") == best["answer"]
    passed, best = await tried(threshold=1.0, on_risk="abstain")
    assert (passed.text, "gate" in get_risk(passed).to_dict()) == (best["answer"], False)
    with pytest.raises(HallucinationRiskError, match="least risky of 2 answers has a max_risk of") as error:
        await tried(on_risk="raise")
    assert error.value.threshold == 0.0
    assert error.value.value == error.value.report.max_risk


@pytest.mark.also_remote(False)
def test_it_raises_for_with_fallbacks(quick_chat: ChatCocoa, retriever: Listed) -> None:
    chain = with_risk_retry(retriever, PROMPT, quick_chat, threshold=0.0, max_tries=1, on_risk="raise")
    other = RunnableLambda(lambda question: AIMessage("Ask a person."))
    strict = chain.with_fallbacks([other], exceptions_to_handle=(HallucinationRiskError,))
    assert strict.invoke(QUESTION).text == "Ask a person."


@pytest.mark.also_remote(False)  # it measures context lift
def test_other_documents_and_what_comes_back(quick_chat: ChatCocoa, retriever: Listed) -> None:
    other = RunnableLambda(lambda question: [DOCUMENTS[0], DOCUMENTS[4]])
    chain = with_risk_retry(
        retriever,
        ChatPromptTemplate.from_template("{style}: {given}\n{asked}"),
        quick_chat,
        threshold=0.0,
        second_retriever=other,
        question="asked",
        context="given",
        context_lift=True,
        return_documents=True,
    )
    result = chain.invoke({"asked": QUESTION, "style": "short"}, max_tokens=4)
    tries = result["answer"].response_metadata["cocoa_tries"]
    assert [one["documents"] for one in tries] == [1, 2, 2]  # the one that both found is there once
    number = next(number for number, one in enumerate(tries) if one["chosen"])
    assert result["given"] == ([DOCUMENTS[0]] if number == 0 else [DOCUMENTS[0], DOCUMENTS[4]])
    assert (result["asked"], result["style"]) == (QUESTION, "short")
    assert all("context_lift" in span for span in get_risk(result["answer"]).to_dict()["spans"])
    assert result["answer"].usage_metadata["output_tokens"] <= 4
    assert isinstance(
        (with_risk_retry(retriever, PROMPT, quick_chat, threshold=1.0) | StrOutputParser()).invoke("a"), str
    )


def test_a_vector_store_returns_more() -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    store.add_documents([Document(str(number)) for number in range(12)])
    few = store.as_retriever(search_kwargs={"k": 2})
    assert len(with_top_k(few, 3).invoke(QUESTION)) == 6
    assert len(few.invoke(QUESTION)) == 2
    default = store.as_retriever()
    assert top_k_of(default) == 4
    assert len(with_top_k(default, 2).invoke(QUESTION)) == 8
    diverse = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 3})
    assert len(with_top_k(diverse, 3).invoke(QUESTION)) == 6


@pytest.mark.also_remote(False)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chat": StrOutputParser()}, "takes a ChatCocoa, not a StrOutputParser"),
        ({"retriever": None}, "retriever takes a runnable, not a NoneType"),
        ({"retriever": RunnableLambda(lambda question: DOCUMENTS)}, "no number of documents to increase"),
        ({"max_tries": 0}, "max_tries: .* greater than or equal to 1"),
        ({"top_k_growth": 0.5}, "top_k_growth: .* greater than or equal to 1"),
        ({"settings": {"alpha": 3.0}}, "settings: .* Sequence"),
        ({"settings": [{"alhpa": 3.0}]}, "alhpa"),
        ({"settings": [{}], "top_k_growth": 1}, "every attempt would be the same"),
        ({"settings": [{"alpha": 3.0}], "alphas": [3.0]}, "both given"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], words: str, quick_chat: ChatCocoa, retriever: Listed) -> None:
    arguments: dict[str, Any] = {"retriever": retriever, "prompt": PROMPT, "chat": quick_chat, "threshold": 0.5}
    with pytest.raises(ConfigError, match=words):
        with_risk_retry(**{**arguments, **changes})


@pytest.mark.parametrize("settings", [None, [{"alpha": 0.0}], [{"alpha": 0}, {"max_tokens": 12}]])
def test_settings_that_change_nothing(settings: Any, quick_engine: CocoaEngine, retriever: Listed) -> None:
    chat = ChatCocoa(engine=quick_engine, max_tokens=12, alpha=0.0)
    with pytest.raises(ConfigError, match="every attempt would be the same"):
        with_risk_retry(retriever, PROMPT, chat, threshold=0.5, settings=settings, top_k_growth=1)
    with_risk_retry(retriever, PROMPT, chat, threshold=0.5, settings=[{"alpha": 1.0}], top_k_growth=1)
