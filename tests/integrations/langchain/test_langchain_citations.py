"""Citations by measurement: each document left out of the prompt in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from pydantic import TypeAdapter

from cocoa_engine import ConfigError
from cocoa_integrations.langchain import ChatCocoa, get_risk, get_spans, with_citations, with_context_lift
from cocoa_integrations.langchain.messages import to_chat
from cocoa_integrations.schema import CitationEntry, RiskReport
from tests.helpers.reasoning_models import HYBRID, PLAIN, reasoning_engine, saying

DOCUMENTS = [Document("the red one", id="a", metadata={"file": "x"}), Document("a loaf is nine"), Document("it rains")]
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
VALUES = {"context": DOCUMENTS, "question": "Who is it?"}


async def called(chain: Any, how: str) -> AIMessage:
    if how == "invoke":
        return await asyncio.to_thread(chain.invoke, VALUES)
    if how == "ainvoke":
        return await chain.ainvoke(VALUES)
    return (await asyncio.to_thread(chain.batch, [VALUES, VALUES]))[1]


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "batch"])
async def test_citations(how: str, quick_chat: ChatCocoa) -> None:
    joined = ["\n\n".join(one.page_content for one in DOCUMENTS if one is not out) for out in (None, *DOCUMENTS)]
    prompts = [PROMPT.invoke({**VALUES, "context": text}) for text in joined]
    plain = quick_chat.invoke(prompts[0])
    message = await called(with_citations(PROMPT, quick_chat, min_lift=0.0), how)
    report, spans = get_risk(message), get_spans(message)
    citations = message.response_metadata["cocoa_citations"]
    TypeAdapter(RiskReport).validate_python(report)
    TypeAdapter(list[CitationEntry]).validate_python(citations)
    assert citations
    for entries in (spans, report["spans"], citations):
        assert all(message.text[one["start"] : one["end"]] == one["text"] for one in entries)
    assert report["spans"] == spans
    assert [span["text"] for span in spans] == [span["text"] for span in get_spans(plain)]
    assert report["max_risk"] == get_risk(plain)["max_risk"]
    for citation in citations:
        assert message.text[citation["end"] :].lstrip().startswith(f"[{citation['source']}]")
        document = DOCUMENTS[citation["source"] - 1]
        assert (citation["id"], citation["metadata"]) == (document.id, document.metadata)
    assert dumps(message)

    engine = quick_chat.load()
    full, *bare = [
        engine.score(engine.encode_chat(to_chat(prompt.to_messages())), plain.text).spans[0].log_prob
        for prompt in prompts
    ]
    for number in range(3):
        total = sum(span["source_lifts"][number] or 0.0 for span in spans)
        assert total == pytest.approx(full - bare[number], abs=1e-3)


def test_without_markers_and_options_of_a_call(quick_chat: ChatCocoa) -> None:
    chain = with_citations(PROMPT, quick_chat, min_lift=0.0, markers=False)
    message = chain.invoke(VALUES, max_tokens=4)
    filled = PROMPT.invoke({**VALUES, "context": "\n\n".join(one.page_content for one in DOCUMENTS)})
    assert message.text == quick_chat.invoke(filled, max_tokens=4).text
    assert message.response_metadata["cocoa_citations"]
    nothing = with_citations(PROMPT, quick_chat).invoke({**VALUES, "context": []})
    assert nothing.response_metadata["cocoa_citations"] == []
    assert isinstance((chain | StrOutputParser()).invoke(VALUES), str)


@pytest.mark.parametrize("given", ["text", None, ["text"]])
def test_an_input_without_documents(given: Any, quick_chat: ChatCocoa) -> None:
    with pytest.raises(ConfigError, match="needs a list of documents under 'context'"):
        with_citations(PROMPT, quick_chat).invoke({**VALUES, "context": given})


def test_bad_arguments(quick_chat: ChatCocoa) -> None:
    with pytest.raises(ConfigError, match="takes a ChatCocoa"):
        with_citations(PROMPT, StrOutputParser())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_lift takes a finite number"):
        with_citations(PROMPT, quick_chat, min_lift="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("detail", ["full", "compact"])
def test_the_reasoning_is_not_cited(detail: str) -> None:
    engine = reasoning_engine(PLAIN)
    chat = ChatCocoa(engine=engine, risk_metadata=detail, **saying(engine, "<think>red\nloaf</think>\n\nThe red one."))
    plain = chat.invoke(PROMPT.invoke({**VALUES, "context": "x"}))
    message = with_citations(PROMPT, chat, min_lift=-100.0).invoke(VALUES)
    citations, spans = message.response_metadata["cocoa_citations"], get_spans(message)
    TypeAdapter(list[CitationEntry]).validate_python(citations)
    assert plain.text == "The red one."
    assert "".join(one["text"] for one in citations) == plain.text
    assert all(message.text[one["start"] : one["end"]] == one["text"] for one in citations)
    for citation in citations:
        assert message.text[citation["end"] :].lstrip().startswith(f"[{citation['source']}]")
        assert all(spans[number]["source"] == citation["source"] for number in citation["spans"])
    assert [span["text"] for span in spans] == [span["text"] for span in get_spans(plain)]
    generated = "<think>red\nloaf</think>\n\n" + message.text
    assert all(generated[span["start"] : span["end"]] == span["text"] for span in spans)
    reasoning = [span for span in spans if span["part"] == "reasoning"]
    assert reasoning
    assert all(span["source"] is None and len(span["source_lifts"]) == 3 for span in reasoning)


def look_up(word: str) -> str:
    """Look up a word."""
    return word


@pytest.mark.parametrize("make", [with_citations, with_context_lift])
@pytest.mark.parametrize(
    "options",
    [
        {"tools": [look_up]},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True},
    ],
)
def test_the_lift_is_of_the_prompt_that_was_answered(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = reasoning_engine(HYBRID)
    chat = ChatCocoa(engine=engine, **saying(engine, "It is red."))
    encoded: list[Any] = []
    encode = engine.encode_chat

    def kept(*args: Any, **kwargs: Any) -> list[int]:
        encoded.append(encode(*args, **kwargs))
        return encoded[-1]

    monkeypatch.setattr(engine, "encode_chat", kept)
    begun = [("ai", "It")] if "continue_final_message" in options else []
    prompt = ChatPromptTemplate.from_messages([("user", "{context} {question}"), *begun])
    values = {**VALUES, "context": DOCUMENTS if make is with_citations else "the red one"}
    make(prompt, chat).invoke(values, **options)
    answered, full, *bare = encoded
    assert full == answered
    assert bare
    assert answered not in bare
