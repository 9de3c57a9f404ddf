"""Query engines over a real BM25 index: the risk is had around ``query``, which itself returns only text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from llama_index.retrievers.bm25 import BM25Retriever

from cocoa_engine.report import RiskReport
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent, collect_risk
from tests.helpers.llama_index_helpers import Listener

QUESTION = "Who built the lighthouse?"


@pytest.fixture(scope="module")
def retriever() -> BM25Retriever:
    texts = [
        "The lighthouse was built by the engineer Marta Lindqvist.",
        "The lighthouse is 41 metres high.",
        "The bakery is closed on Mondays.",
    ]
    return BM25Retriever.from_defaults(nodes=[TextNode(text=text) for text in texts], similarity_top_k=2)


@pytest.mark.parametrize("streaming", [False, True])
def test_query(streaming: bool, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=streaming)
    with collect_risk() as reports:
        response = engine.query(QUESTION)
        assert isinstance(response, StreamingResponse if streaming else Response)
        text = "".join(response.response_gen) if isinstance(response, StreamingResponse) else response.response
    _check(reports, text, response)


@pytest.mark.parametrize("streaming", [False, True])
async def test_aquery(streaming: bool, llm: CocoaLLM, retriever: BM25Retriever) -> None:
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, streaming=streaming)
    with collect_risk() as reports:
        response = await engine.aquery(QUESTION)
        assert isinstance(response, AsyncStreamingResponse if streaming else Response)
        if isinstance(response, AsyncStreamingResponse):
            text = "".join([delta async for delta in response.response_gen])
        else:
            text = response.response
    _check(reports, text, response)


def _check(reports: list[RiskReport], text: str | None, response: Any) -> None:
    (report,) = reports
    assert "".join(span.text or "" for span in report.spans) == text
    assert text
    assert "lighthouse" in response.source_nodes[0].text


def test_a_text_completing_model_answers_too(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    raw = CocoaLLM(engine=llm.engine, max_new_tokens=4, is_chat_model=False)
    with collect_risk() as reports:
        response = RetrieverQueryEngine.from_args(retriever, llm=raw).query(QUESTION)
    assert "".join(span.text or "" for span in reports[0].spans) == str(response)


@pytest.mark.parametrize(
    ("mode", "use_async", "answers"),
    [(ResponseMode.REFINE, False, 2), (ResponseMode.TREE_SUMMARIZE, True, 1), (ResponseMode.ACCUMULATE, True, 2)],
)
def test_synthesizers_that_ask_more_than_once(
    mode: ResponseMode, use_async: bool, answers: int, llm: CocoaLLM, retriever: BM25Retriever, heard: Listener
) -> None:
    engine = RetrieverQueryEngine.from_args(
        retriever, llm=llm, response_mode=mode, use_async=use_async, node_postprocessors=[]
    )
    with collect_risk() as reports:
        response = engine.query(QUESTION)
    assert len(reports) == len(heard.of(CocoaRiskEvent)) == answers
    last = "".join(span.text or "" for span in reports[-1].spans)
    assert last in str(response)


async def _ask(how: str, chat: BaseChatEngine, question: str) -> str:
    """The answer of a chat engine by one of its four methods."""
    if how == "chat":
        return (await asyncio.to_thread(chat.chat, question)).response
    if how == "stream_chat":
        stream = await asyncio.to_thread(chat.stream_chat, question)
        return "".join(await asyncio.to_thread(list, stream.response_gen))
    if how == "achat":
        return (await chat.achat(question)).response
    astream = await chat.astream_chat(question)
    return "".join([delta async for delta in astream.async_response_gen()])


@pytest.mark.parametrize("how", ["chat", "stream_chat", "achat", "astream_chat"])
@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
async def test_chat_engines_report_each_answer_and_leak_none_into_the_next_prompt(
    kind: type[Any], how: str, llm: CocoaLLM, retriever: BM25Retriever, prompts: list[str]
) -> None:
    chat = kind.from_defaults(retriever=retriever, llm=llm)
    with collect_risk() as reports:
        answers = [await _ask(how, chat, question) for question in (QUESTION, "How high is it?")]
    # CondensePlusContext first asks the model to rewrite the second question
    assert len(reports) == len(prompts) == (2 if kind is ContextChatEngine else 3)
    texts = ["".join(span.text or "" for span in report.spans) for report in reports]
    assert [texts[0].strip(), texts[-1].strip()] == [answer.strip() for answer in answers]
    assert answers[0].strip() in prompts[-1]
    assert not [prompt for prompt in prompts if "cocoa" in prompt or "mlds" in prompt]


@pytest.mark.also_remote
def test_a_chat_engine_with_context_keeps_risk_out_of_its_history(llm: CocoaLLM, retriever: BM25Retriever) -> None:
    chat = ContextChatEngine.from_defaults(retriever=retriever, llm=llm)
    with collect_risk() as reports:
        chat.chat(QUESTION)
        second = chat.chat("How high is it?")
    assert len(reports) == 2
    assert "".join(span.text or "" for span in reports[1].spans) == second.response
    assert len(chat.chat_history) == 4
    assert all("cocoa" not in message.model_dump_json() for message in chat.chat_history)
