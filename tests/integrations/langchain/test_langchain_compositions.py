"""Retries, gates and citations after each other, in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import permutations
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from cocoa_engine.errors import ConfigError, HallucinationRiskError
from cocoa_integrations.langchain import ChatCocoa, get_risk, risk_gate, with_citations, with_risk_retry
from tests.helpers.alike import near
from tests.helpers.reports import without_markers

TEXTS = [
    "The lighthouse of Halden Island was built in 1874 by the engineer Marta Lindqvist.",
    "The keeper of the lighthouse was Jonas Berg.",
    "The ferry to Halden Island leaves at 9 in the morning.",
]
DOCUMENTS = [Document(text, id=str(number)) for number, text in enumerate(TEXTS)]
PROMPT = ChatPromptTemplate.from_template("Context:\n{context}\n\nAnswer in one sentence: {question}")
WORDS = [Document(text) for text in ("the red one", "a loaf is nine", "it rains", "no", "yes and no")]
QUICK_PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
QUESTION = "Who built the lighthouse, and who was its keeper?"
MARKS = str.maketrans("", "", "<>")


def plain(text: str) -> str:
    return without_markers(text).translate(MARKS)


async def called(chain: Runnable[Any, Any], how: str) -> AIMessage:
    if how == "invoke":
        return await asyncio.to_thread(chain.invoke, QUESTION)
    if how == "ainvoke":
        return await chain.ainvoke(QUESTION)
    return [chunk async for chunk in chain.astream(QUESTION)][-1]


def steps_of(names: Sequence[str], chat: ChatCocoa, **of_citations: Any) -> Runnable[Any, Any]:
    """A chain of a retry and the named steps."""
    chain: Any = with_risk_retry(
        RunnableLambda(lambda _: DOCUMENTS),
        PROMPT,
        chat,
        threshold=0.0,
        max_tries=2,
        top_k_growth=1,
        return_documents=True,
    )
    has_documents = True
    for name in names:
        if name == "cite":
            chain |= with_citations(PROMPT, chat, **of_citations)
            has_documents = False
        else:
            gate = risk_gate(0.0, on_risk=name, mark="<{text}>")  # type: ignore[arg-type]
            chain |= RunnablePassthrough.assign(answer=itemgetter("answer") | gate) if has_documents else gate
    return chain if not has_documents else chain | itemgetter("answer")


@pytest.mark.parametrize("how", ["invoke", "astream"])
async def test_a_retried_answer_is_cited_and_marked_in_any_order(how: str, quick_chat: ChatCocoa) -> None:
    alone = await called(steps_of(["cite"], quick_chat, min_attention=0.0), how)
    assert alone.text != plain(alone.text)
    tries = alone.response_metadata["cocoa_tries"]
    assert [one["answer"] for one in tries if one["chosen"]] == [plain(alone.text)]
    shown = {
        (await called(steps_of(order, quick_chat, min_attention=0.0), how)).text
        for order in permutations(["cite", "mark"])
    }
    assert len(shown) == 1
    (text,) = shown
    assert "<" in text
    assert without_markers(text).translate(MARKS) == plain(alone.text)
    orders = [*permutations(["cite", "mark", "abstain"])]
    for order in orders if how == "invoke" else orders[:1]:
        message = await called(steps_of(order, quick_chat), how)
        assert message.text == "I don't know."
        assert get_risk(message).to_dict()["gate"]["action"] == "abstain"
        assert len(message.response_metadata["cocoa_tries"]) == 2


def test_an_answer_whose_passages_are_not_known_is_cited_by_lift(quick_chat: ChatCocoa) -> None:
    """The retry names its passages only where all are in the prompt."""

    def shouted(documents: Sequence[Document]) -> str:
        return "\n".join([documents[0].page_content.upper(), *(one.page_content for one in documents[1:])])

    retry = with_risk_retry(
        RunnableLambda(lambda _: DOCUMENTS),
        PROMPT,
        quick_chat,
        threshold=1.0,
        top_k_growth=1,
        format_documents=shouted,
        return_documents=True,
    )
    message = (retry | with_citations(PROMPT, quick_chat, format_documents=shouted)).invoke(QUESTION, max_tokens=8)
    assert all(len(span["source_lifts"]) == 3 for span in get_risk(message).to_dict()["spans"])
    asked = (retry | with_citations(PROMPT, quick_chat, format_documents=shouted, by="attention")).invoke(QUESTION)
    assert asked.response_metadata["cocoa_citations"] == []


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("inside", ["raise", "abstain", "mark"])
async def test_a_gate_inside_of_a_retry(how: str, inside: Any, quick_chat: ChatCocoa) -> None:
    retriever = RunnableLambda(lambda _: WORDS)

    def chain(threshold: float, at: float = 0.0, **options: Any) -> Runnable[Any, Any]:
        gated: Any = quick_chat | risk_gate(at, on_risk=inside, mark="<{text}>")
        return with_risk_retry(
            retriever, QUICK_PROMPT, gated, threshold=threshold, max_tries=2, top_k_growth=1, **options
        )

    passed = await called(chain(1.0, at=1.0), how)
    assert len(passed.response_metadata["cocoa_tries"]) == 1
    if inside == "mark":  # a marked answer is not withheld
        marked = await called(chain(1.0), how)
        assert len(marked.response_metadata["cocoa_tries"]) == 1
        assert plain(marked.text) == passed.text
        return
    refused = await called(chain(1.0, on_risk="abstain", answer="Ask a person."), how)
    tries = refused.response_metadata["cocoa_tries"]
    assert refused.text == "Ask a person."
    assert len(tries) == 2  # below the threshold of the retry, but not of the gate
    gate = get_risk(refused).to_dict()["gate"]
    assert (gate["action"], gate["threshold"]) == ("abstain", 0.0)
    assert get_risk(refused).max_risk == near(min(one["risk"] for one in tries))
    with pytest.raises(HallucinationRiskError, match="which reaches the threshold of 0") as error:
        await called(chain(1.0, on_risk="raise"), how)
    assert error.value.value == near(gate["value"])
    for on_risk in ("keep", "mark"):
        if inside == "abstain":
            assert (await called(chain(0.0, on_risk=on_risk), how)).text == "I don't know."
        else:
            with pytest.raises(HallucinationRiskError):
                await called(chain(0.0, on_risk=on_risk), how)


def test_a_retry_goes_on_after_a_gate_that_raised(quick_chat: ChatCocoa) -> None:
    seen: list[AIMessage] = []

    def first_is_stopped(message: AIMessage) -> AIMessage:
        seen.append(message)
        return risk_gate(0.0).invoke(message) if len(seen) == 1 else message

    gated: Any = quick_chat | RunnableLambda(first_is_stopped)
    chain = with_risk_retry(RunnableLambda(lambda _: WORDS), QUICK_PROMPT, gated, threshold=1.0, top_k_growth=1)
    message = chain.invoke(QUESTION)
    tries = message.response_metadata["cocoa_tries"]
    assert [one["answer"] for one in tries] == [one.text for one in seen]
    assert [one["chosen"] for one in tries] == [False, True]
    assert [one["cocoa_risk"].get("gate", {}).get("action") for one in tries] == ["raise", None]


@pytest.mark.parametrize("action", ["mark", "abstain"])
async def test_a_gate_inside_of_citations(action: Any, quick_chat: ChatCocoa) -> None:
    values = {"context": WORDS, "question": QUESTION}
    gate = risk_gate(0.0, on_risk=action, mark="<{text}>")
    inside = with_citations(QUICK_PROMPT, quick_chat | gate, min_lift=0.0)  # type: ignore[arg-type]
    outside = with_citations(QUICK_PROMPT, quick_chat, min_lift=0.0) | gate
    assert inside.invoke(values).text == (await outside.ainvoke(values)).text == (await inside.ainvoke(values)).text
    with pytest.raises(HallucinationRiskError):
        with_citations(QUICK_PROMPT, quick_chat | risk_gate(0.0)).invoke(values)  # type: ignore[arg-type]


def test_steps_in_the_place_of_the_model_are_refused(quick_chat: ChatCocoa) -> None:
    citing: Any = with_citations(QUICK_PROMPT, quick_chat)
    retry: Any = with_risk_retry(RunnableLambda(lambda _: WORDS), QUICK_PROMPT, quick_chat, top_k_growth=1)
    for wrong in (
        lambda: with_risk_retry(RunnableLambda(lambda _: WORDS), QUICK_PROMPT, citing),
        lambda: with_citations(QUICK_PROMPT, retry),
    ):
        with pytest.raises(ConfigError, match=r"return_documents=True\) \| with_citations\(prompt, chat\)"):
            wrong()
