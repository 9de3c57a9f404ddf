"""What clients that know nothing of this server keep of its answers: the risk, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.runnables.utils import add
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import AsyncOpenAI, OpenAI

from cocoa_engine import Generation
from tests.helpers import tool_templates
from tests.helpers.remote import serving
from tests.helpers.reports import wire_report
from tests.helpers.served import HELLO, Speaker, speaker

LIMIT = 24
MESSAGES: Any = HELLO
ASKED = HELLO[0]["content"]


@pytest.fixture(scope="module")
def tiny() -> Speaker:
    return speaker()


@pytest.fixture(scope="module")
def url(tiny: Speaker) -> Iterator[str]:
    with serving(tiny) as url:
        yield url


@pytest.fixture(scope="module")
def report(tiny: Speaker) -> dict[str, Any]:
    """What every client must find."""
    generation: Generation = tiny.chat(HELLO, max_new_tokens=LIMIT)
    found = wire_report(generation)
    assert len(found["spans"]) > 3
    return found


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chat(url: str) -> Any:
    options: Any = {"api_key": "none", "model": "any", "max_tokens": LIMIT, "max_retries": 0}
    return ChatOpenAI(base_url=url, **options)


@pytest.fixture(scope="module")
def llm(url: str) -> Any:
    options = {"is_chat_model": True, "max_tokens": LIMIT, "temperature": 0.0, "max_retries": 0}
    return OpenAILike(model="any", api_base=url, api_key="none", **options)


class TestOpenAI:
    """openai-python."""

    def test_a_whole_answer(self, client: Any, report: dict[str, Any]) -> None:
        answer = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=LIMIT)
        [choice] = answer.choices
        assert choice.message.cocoa_risk == report
        assert choice.logprobs.cocoa_risk == report
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details.cocoa_max_risk == report["max_risk"]

    def test_chunks(self, client: Any, report: dict[str, Any]) -> None:
        stream = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=LIMIT, stream=True)
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
        spans = [span for delta in deltas for span in getattr(delta, "cocoa_spans", ())]
        assert spans == report["spans"]
        assert deltas[-1].cocoa_risk == report

    def test_the_stream_helper_joins_spans_without_adding_them_up(self, client: Any, report: dict[str, Any]) -> None:
        with client.chat.completions.stream(
            model="any",
            messages=MESSAGES,
            max_tokens=LIMIT,
            stream_options={"include_usage": True},
        ) as stream:
            answer = stream.get_final_completion()
        message: Any = answer.choices[0].message
        assert message.cocoa_spans == report["spans"]
        assert message.cocoa_risk == report
        assert message.content == "".join(span["text"] for span in report["spans"])
        usage: Any = answer.usage
        assert usage.completion_tokens_details.cocoa_max_risk == report["max_risk"]

    async def test_the_asynchronous_stream_helper_joins_two_answers(self, url: str) -> None:
        async with (
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
            client.chat.completions.stream(
                model="any",
                messages=MESSAGES,
                n=2,
                seed=5,
                temperature=1.5,
            ) as stream,
        ):
            answer = await stream.get_final_completion()
        messages: list[Any] = [choice.message for choice in answer.choices]
        assert messages[0].content != messages[1].content
        for message in messages:
            assert message.cocoa_spans == message.cocoa_risk["spans"]
            assert "".join(span["text"] for span in message.cocoa_spans) == message.content

    def test_the_stream_helper_joins_calls_of_tools(self) -> None:
        says = '<tool_call>\n{"name": "move", "arguments": {"up": true}}\n</tool_call>'
        properties = {"up": {"type": "boolean"}}
        move: Any = {"name": "move", "parameters": {"type": "object", "properties": properties}}
        with (
            serving(speaker(says, template=tool_templates.HERMES)) as url,
            OpenAI(base_url=url, api_key="none", max_retries=0) as client,
            client.chat.completions.stream(
                model="any",
                messages=MESSAGES,
                tools=[{"type": "function", "function": move}],
            ) as stream,
        ):
            message: Any = stream.get_final_completion().choices[0].message
        [call] = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("move", '{"up": true}')
        [measured] = message.cocoa_risk["tool_calls"]
        assert (measured["name"], list(measured["arguments"])) == ("move", ["up"])


class TestChatOpenAI:
    """LangChain's model keeps the copy in ``logprobs`` only."""

    def test_a_whole_answer(self, chat: Any, report: dict[str, Any]) -> None:
        message = chat.invoke(ASKED)
        assert message.response_metadata["logprobs"]["cocoa_risk"] == report
        details = message.response_metadata["token_usage"]["completion_tokens_details"]
        assert details["cocoa_max_risk"] == report["max_risk"]

    def test_chunks_and_their_sum(self, chat: Any, report: dict[str, Any]) -> None:
        chunks = list(chat.stream(ASKED))
        kept = [chunk.response_metadata.get("logprobs") or {} for chunk in chunks]
        assert [span for one in kept for span in one.get("cocoa_spans", ())] == report["spans"]
        message: Any = add(chunks)
        assert message.response_metadata["logprobs"]["cocoa_spans"] == report["spans"]
        assert message.response_metadata["logprobs"]["cocoa_risk"] == report

    async def test_asynchronous_chunks(self, chat: Any, report: dict[str, Any]) -> None:
        message: Any = add([chunk async for chunk in chat.astream(ASKED)])
        assert message.response_metadata["logprobs"]["cocoa_risk"] == report


class TestOpenAILike:
    """LlamaIndex's model keeps what the server sent in ``raw``."""

    def test_a_whole_answer(self, llm: Any, report: dict[str, Any]) -> None:
        raw: Any = llm.chat([ChatMessage(role="user", content=ASKED)]).raw
        assert raw.choices[0].message.cocoa_risk == report

    def test_chunks(self, llm: Any, report: dict[str, Any]) -> None:
        raws: list[Any] = [one.raw for one in llm.stream_chat([ChatMessage(role="user", content=ASKED)])]
        deltas = [choice.delta for raw in raws for choice in raw.choices]
        assert [span for delta in deltas for span in getattr(delta, "cocoa_spans", ())] == report["spans"]
        assert deltas[-1].cocoa_risk == report
