"""Citations by measurement, and the lift of each span by the context in the prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from pydantic import TypeAdapter

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine import engine as engine_module
from cocoa_integrations._shared.citations import Citation
from cocoa_integrations.langchain import (
    ChatCocoa,
    context_lift,
    get_risk,
    get_spans,
    with_citations,
    with_context_lift,
    with_risk_retry,
)
from tests.helpers.alike import near
from tests.helpers.reasoning_models import HYBRID, PLAIN, reasoning_engine, saying
from tests.helpers.reports import stand_in, to_dicts
from tests.helpers.rivals import heads_file, heads_of

DOCUMENTS = [Document("the red one", id="a", metadata={"file": "x"}), Document("a loaf is nine"), Document("it rains")]
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
VALUES = {"context": DOCUMENTS, "question": "Who is it?"}


def test_without_markers_and_options_of_a_call(quick_chat: ChatCocoa) -> None:
    chain = with_citations(PROMPT, quick_chat, min_lift=0.0, markers=False)
    message = chain.invoke(VALUES, max_tokens=4)
    filled = PROMPT.invoke({**VALUES, "context": "\n\n".join(one.page_content for one in DOCUMENTS)})
    assert message.text == quick_chat.invoke(filled, max_tokens=4).text
    assert message.response_metadata["cocoa_citations"]
    nothing = with_citations(PROMPT, quick_chat).invoke({**VALUES, "context": []})
    assert nothing.response_metadata["cocoa_citations"] == []
    assert isinstance((chain | StrOutputParser()).invoke(VALUES), str)


@pytest.mark.parametrize("detail", ["full", "compact"])
def test_the_reasoning_is_not_cited(detail: str) -> None:
    engine = reasoning_engine(PLAIN)
    chat = ChatCocoa(engine=engine, risk_metadata=detail, **saying(engine, "<think>red\nloaf</think>\n\nThe red one."))
    plain = chat.invoke(PROMPT.invoke({**VALUES, "context": "x"}))
    message = with_citations(PROMPT, chat, min_lift=-100.0).invoke(VALUES)
    citations, spans = message.response_metadata["cocoa_citations"], to_dicts(get_spans(message))
    TypeAdapter(list[Citation]).validate_python(citations)
    assert plain.text == "The red one."
    assert "".join(one["text"] for one in citations) == plain.text
    assert re.fullmatch(r"The red one (\[\d\])+\.", message.text)
    assert stand_in(message.text, citations)
    for citation in citations:
        assert all(spans[number]["source"] == citation["source"] for number in citation["spans"])
    assert [span["text"] for span in spans] == [span["text"] for span in to_dicts(get_spans(plain))]
    generated = "<think>red\nloaf</think>\n\n" + message.text
    assert stand_in(generated, spans)
    reasoning = [span for span in spans if span["part"] == "reasoning"]
    assert reasoning
    assert all(span["source"] is None and len(span["source_lifts"]) == 3 for span in reasoning)


@pytest.fixture
def seeing_chat(quick_engine: CocoaEngine, tmp_path: Path) -> ChatCocoa:
    """A model whose retrieval heads are known."""
    size = quick_engine.num_layers, quick_engine.model.config.num_attention_heads
    heads = heads_file(tmp_path, *size, heads_of(quick_engine.model))
    return ChatCocoa(engine=quick_engine, max_tokens=12, risk_metadata="full", decore_heads=heads)


def test_documents_that_the_prompt_changes_are_not_cited_by_attention(seeing_chat: ChatCocoa) -> None:
    chain = with_citations(
        PROMPT,
        seeing_chat,
        by="attention",
        min_attention=0.0,
        format_documents=lambda documents: f"{documents[0].page_content.upper()}; {documents[1].page_content}",
    )
    message = chain.invoke(VALUES)
    for span in to_dicts(get_spans(message)):
        first, second, third = span["source_attentions"]
        assert (first, third) == (None, None)
        assert second > 0
    assert {one["source"] for one in message.response_metadata["cocoa_citations"]} == {2}


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_by_default_they_are_by_attention(how: str, quick_chat: ChatCocoa) -> None:
    values = {**VALUES, "question": "Is it red or blue? " * 10}
    chain = with_citations(PROMPT, quick_chat, min_attention=0.0, min_lift=0.0)
    first, again = [await chain.ainvoke(values) if how == "ainvoke" else chain.invoke(values) for _ in range(2)]
    assert first.response_metadata["cocoa_citations"]
    assert all("attention" in one for one in first.response_metadata["cocoa_citations"])
    assert again.usage_metadata["input_token_details"]["cache_read"] > 64  # type: ignore[index]
    assert again.text == first.text
    for span, same in zip(to_dicts(get_spans(again)), to_dicts(get_spans(first)), strict=True):
        assert span["source_attentions"] == near(same["source_attentions"])


@pytest.mark.parametrize("detail", ["full", "compact"])
async def test_retries_and_streams_name_their_passages(detail: Any, seeing_chat: ChatCocoa) -> None:
    chat = seeing_chat.model_copy(update={"risk_metadata": detail})
    chain = with_risk_retry(RunnableLambda(lambda _: DOCUMENTS), PROMPT, chat, threshold=0.0, top_k_growth=1)
    for message in (chain.invoke("Who is it?"), await chain.ainvoke("Who is it?")):
        for span in to_dicts(get_spans(message)):
            assert len(span["passage_attention"]) == 3
            assert span["source_attention"] > 0
    other = with_risk_retry(
        RunnableLambda(lambda _: DOCUMENTS), PROMPT, chat, threshold=0.0, top_k_growth=1, format_documents=len
    )
    assert all("passage_attention" not in span for span in to_dicts(get_spans(other.invoke("Who is it?"))))
    text = chat.prompt_text("the red one; it rains")
    start = text.index("it rains")
    chunks = list(chat.stream("the red one; it rains", source=[(start, start + 8)]))
    spans = [span for chunk in chunks for span in chunk.additional_kwargs.get("cocoa_spans", [])]
    if detail == "full":
        assert spans
        assert all(len(span["passage_attention"]) == 1 for span in spans)
    with pytest.raises(ConfigError, match="is not in the prompt"):
        chat.invoke("it rains", source=["it snows"])


@pytest.mark.parametrize("by", [None, "attention"])
def test_the_documents_take_the_place_of_other_sources(by: Any, quick_chat: ChatCocoa) -> None:
    chat = quick_chat.model_copy(update={"source": ["Who"]})
    for format_documents, count in ((len, 0), (lambda documents: DOCUMENTS[0].page_content, 1)):
        chain = with_citations(PROMPT, chat, by=by, min_attention=0.0, format_documents=format_documents)
        for span in to_dicts(get_spans(chain.invoke(VALUES))):
            values = span.get("source_attentions") or span["source_lifts"]
            assert len(values) == 3
            assert by is None or sum(value is not None for value in values) == count


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
    prompts: list[str] = []
    encoded = engine_module.chat_ids
    begun = [("ai", "It")] if "continue_final_message" in options else []

    def kept(*args: Any) -> tuple[str, list[int]]:
        text, token_ids = encoded(*args)
        prompts.append(text)
        return text, token_ids

    monkeypatch.setattr(engine_module, "chat_ids", kept)
    prompt = ChatPromptTemplate.from_messages([("user", "{context} {question}"), *begun])
    values = {**VALUES, "context": DOCUMENTS if make is with_citations else "the red one"}
    chain = with_citations(prompt, chat, by="lift") if make is with_citations else make(prompt, chat)
    chain.invoke(values, **options)
    answered, full, *bare = prompts
    assert full == answered
    assert bare
    assert answered not in bare


def test_answers_with_other_passages_are_not_taken_from_a_cache(seeing_chat: ChatCocoa) -> None:
    cached = seeing_chat.model_copy(update={"cache": InMemoryCache()})
    assert "passage_attention" not in to_dicts(get_spans(cached.invoke("it rains")))[0]
    assert len(to_dicts(get_spans(cached.invoke("it rains", source=["rains"])))[0]["passage_attention"]) == 1


PASSAGE = "The lighthouse of Hvalnes was built by the engineer Marta Lindqvist in 1911."
ASKED = "Who built the lighthouse of Hvalnes?"
GROUNDED = ChatPromptTemplate.from_template("Context: {context}\n\nQuestion: {question}")
KEYS = ("context_lift", "con_mlds_lift", "f_mlds_lift")


@pytest.fixture(scope="module")
def long_chat(engine: CocoaEngine) -> ChatCocoa:
    return ChatCocoa(engine=engine, max_tokens=24, risk_metadata="full")


@pytest.fixture(scope="module")
def grounded(long_chat: ChatCocoa) -> AIMessage:
    return with_context_lift(GROUNDED, long_chat).invoke({"context": PASSAGE, "question": ASKED})


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
            engine.encode_chat([{"role": "user", "content": f"Context: {context}\n\nQuestion: {ASKED}"}]),
            str(grounded.content),
        ).spans[0]
        for context in (PASSAGE, "")
    )
    assert sum(span["context_lift"] for span in spans) == pytest.approx(full.log_prob - bare.log_prob, abs=1e-2)
    assert max(span["context_lift"] for span in spans) > 5
    assert [[span[key] for key in KEYS] for span in get_risk(grounded).to_dict()["spans"]] == [
        [span[key] for key in KEYS] for span in spans
    ]
    assert all(isinstance(span[key], float) for span in spans for key in KEYS)
    assert json.loads(grounded.model_dump_json())["additional_kwargs"]["cocoa_spans"] == spans


def test_of_a_message_and_of_summed_chunks(quick_chat: ChatCocoa) -> None:
    full, bare = f"{PASSAGE}\n{ASKED}", [HumanMessage(ASKED)]
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
    retriever = RunnableLambda(lambda _: [Document(PASSAGE)])
    joined = retriever | (lambda documents: "\n\n".join(document.page_content for document in documents))
    chain = {"context": joined, "question": RunnablePassthrough()} | with_context_lift(GROUNDED, quick_chat)
    expected = chain.invoke(ASKED)
    assert "context_lift" in to_dicts(get_spans(expected))[0]
    assert_same_lifts(await chain.ainvoke(ASKED), expected)
    (streamed,) = chain.stream(ASKED)
    assert_same_lifts(streamed, expected)


async def test_options_of_a_call_are_the_models(quick_chat: ChatCocoa) -> None:
    chain = with_context_lift(GROUNDED, quick_chat)
    values = {"context": PASSAGE, "question": ASKED}
    options: dict[str, Any] = {"max_tokens": 3, "span_log_prob": "mean"}
    short = chain.invoke(values, **options)
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] == 3
    expected = with_context_lift(GROUNDED, quick_chat.model_copy(update={"max_new_tokens": 3, "span_log_prob": "mean"}))
    assert_same_lifts(short, expected.invoke(values))
    assert_same_lifts(await chain.ainvoke(values, **options), short)
    with pytest.raises(ConfigError, match="did you mean 'alpha'"):
        chain.invoke(values, alfa=1.0)


def test_context_as_messages(quick_chat: ChatCocoa) -> None:
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("notes"), ("user", "{context}{question}")])
    chain = with_context_lift(prompt, quick_chat, context=["notes"], empty=[])
    values: dict[str, Any] = {"notes": [HumanMessage(PASSAGE)], "context": "", "question": ASKED}
    found = chain.invoke(values)
    message = quick_chat.invoke(prompt.invoke(values))
    plain = context_lift(quick_chat, message, [HumanMessage(PASSAGE), HumanMessage(ASKED)], ASKED)
    assert_same_lifts(found, plain)


def test_bad_input(quick_chat: ChatCocoa) -> None:
    for documents in ("text", None, ["text"]):
        with pytest.raises(ConfigError, match="needs a list of documents under 'context'"):
            with_citations(PROMPT, quick_chat).invoke({**VALUES, "context": documents})
    with pytest.raises(ConfigError, match="takes a ChatCocoa"):
        with_citations(PROMPT, StrOutputParser())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a ChatCocoa in this process, not a FakeListChatModel"):
        with_context_lift(GROUNDED, FakeListChatModel(responses=["a"]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="measured with a ChatCocoa"):
        context_lift(FakeListChatModel(responses=["a"]), AIMessage("a"), "b", "c")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the input has no context"):
        with_context_lift(GROUNDED, quick_chat).invoke({"question": "?"})
    with pytest.raises(ConfigError, match="has no risk report"):
        context_lift(quick_chat, AIMessage("a"), "b", "c")
