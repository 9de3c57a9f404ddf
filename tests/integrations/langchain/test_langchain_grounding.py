"""The lift of each span by the context in the prompt, on a message and as a step of a chain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.langchain import ChatCocoa, context_lift, get_risk, get_spans, with_context_lift
from tests.helpers.alike import near
from tests.helpers.reports import to_dicts

CONTEXT = "The lighthouse of Hvalnes was built by the engineer Marta Lindqvist in 1911."
QUESTION = "Who built the lighthouse of Hvalnes?"
PROMPT = ChatPromptTemplate.from_template("Context: {context}\n\nQuestion: {question}")
KEYS = ("context_lift", "con_mlds_lift", "f_mlds_lift")


@pytest.fixture(scope="module")
def long_chat(engine: CocoaEngine) -> ChatCocoa:
    return ChatCocoa(engine=engine, max_tokens=24, risk_metadata="full")


@pytest.fixture(scope="module")
def grounded(long_chat: ChatCocoa) -> AIMessage:
    return with_context_lift(PROMPT, long_chat).invoke({"context": CONTEXT, "question": QUESTION})


def lifts_of(message: AIMessage) -> list[float]:
    """0 for spans without a token of their own."""
    return [span["context_lift"] or 0.0 for span in to_dicts(get_spans(message))]


def assert_same_lifts(a: AIMessage, b: AIMessage) -> None:
    """A prompt that was read before changes the last digits."""
    assert a.content == b.content
    assert lifts_of(a) == pytest.approx(lifts_of(b), abs=1e-3)


def test_figures_are_those_of_plain_scores(grounded: AIMessage, long_chat: ChatCocoa, engine: CocoaEngine) -> None:
    spans = to_dicts(get_spans(grounded))
    assert len(spans) > 1
    assert "".join(span["text"] for span in spans) == grounded.content
    full, bare = (
        engine.score(
            engine.encode_chat([{"role": "user", "content": f"Context: {context}\n\nQuestion: {QUESTION}"}]),
            str(grounded.content),
        ).spans[0]
        for context in (CONTEXT, "")
    )
    assert sum(span["context_lift"] for span in spans) == pytest.approx(full.log_prob - bare.log_prob, abs=1e-2)
    assert max(span["context_lift"] for span in spans) > 5
    assert [[span[key] for key in KEYS] for span in get_risk(grounded).to_dict()["spans"]] == [
        [span[key] for key in KEYS] for span in spans
    ]
    assert all(isinstance(span[key], float) for span in spans for key in KEYS)
    assert json.loads(grounded.model_dump_json())["additional_kwargs"]["cocoa_spans"] == spans


def test_of_a_message_and_of_summed_chunks(quick_chat: ChatCocoa) -> None:
    full, bare = f"{CONTEXT}\n{QUESTION}", [HumanMessage(QUESTION)]
    message = quick_chat.invoke(full)
    before = message.model_copy(deep=True)
    found = context_lift(quick_chat, message, full, bare)
    assert message == before
    assert found.content == message.content
    assert all(key in span for span in to_dicts(get_spans(found)) for key in KEYS)
    assert max(map(abs, lifts_of(found))) > 0.1
    chunks = list(quick_chat.stream(full))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert_same_lifts(context_lift(quick_chat, whole, full, bare), found)
    assert lifts_of(context_lift(quick_chat, message, full, full)) == near([0] * len(lifts_of(found)))


async def test_in_a_chain(quick_chat: ChatCocoa) -> None:
    retriever = RunnableLambda(lambda _: [Document(CONTEXT)])
    joined = retriever | (lambda documents: "\n\n".join(document.page_content for document in documents))
    chain = {"context": joined, "question": RunnablePassthrough()} | with_context_lift(PROMPT, quick_chat)
    expected = chain.invoke(QUESTION)
    assert "context_lift" in to_dicts(get_spans(expected))[0]
    assert_same_lifts(await chain.ainvoke(QUESTION), expected)
    (streamed,) = chain.stream(QUESTION)
    assert_same_lifts(streamed, expected)


async def test_options_of_a_call_are_the_models(quick_chat: ChatCocoa) -> None:
    chain = with_context_lift(PROMPT, quick_chat)
    values = {"context": CONTEXT, "question": QUESTION}
    options: dict[str, Any] = {"max_tokens": 3, "span_log_prob": "mean"}
    short = chain.invoke(values, **options)
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] == 3
    expected = with_context_lift(PROMPT, quick_chat.model_copy(update={"max_new_tokens": 3, "span_log_prob": "mean"}))
    assert_same_lifts(short, expected.invoke(values))
    assert_same_lifts(await chain.ainvoke(values, **options), short)
    with pytest.raises(ConfigError, match="did you mean 'alpha'"):
        chain.invoke(values, alfa=1.0)


def test_context_as_messages(quick_chat: ChatCocoa) -> None:
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("notes"), ("user", "{context}{question}")])
    chain = with_context_lift(prompt, quick_chat, context=["notes"], empty=[])
    values: dict[str, Any] = {"notes": [HumanMessage(CONTEXT)], "context": "", "question": QUESTION}
    found = chain.invoke(values)
    message = quick_chat.invoke(prompt.invoke(values))
    plain = context_lift(quick_chat, message, [HumanMessage(CONTEXT), HumanMessage(QUESTION)], QUESTION)
    assert_same_lifts(found, plain)


def test_bad_input(quick_chat: ChatCocoa) -> None:
    with pytest.raises(ConfigError, match="takes a ChatCocoa in this process, not a FakeListChatModel"):
        with_context_lift(PROMPT, FakeListChatModel(responses=["a"]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="measured with a ChatCocoa"):
        context_lift(FakeListChatModel(responses=["a"]), AIMessage("a"), "b", "c")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the input has no context"):
        with_context_lift(PROMPT, quick_chat).invoke({"question": "?"})
    with pytest.raises(ConfigError, match="has no risk report"):
        context_lift(quick_chat, AIMessage("a"), "b", "c")
