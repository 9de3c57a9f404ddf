"""What clients that know nothing of this server keep of its answers: the risk, whole and streamed."""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.runnables.utils import add
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import AsyncOpenAI, OpenAI

from tests.helpers import tool_templates
from tests.helpers.alike import wire_report
from tests.helpers.live_server import serving
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import HELLO

LIMIT = 24
ASKED: dict[str, Any] = {"model": "any", "messages": HELLO, "max_tokens": LIMIT}


@pytest.fixture(scope="module")
def url(tiny: Speaker) -> Iterator[str]:
    with serving(tiny) as url:
        yield url


@pytest.fixture(scope="module")
def report(tiny: Speaker) -> dict[str, Any]:
    """What every client must find."""
    report = wire_report(tiny.chat(HELLO, max_new_tokens=LIMIT))
    assert len(report["spans"]) > 3
    return report


@pytest.mark.slow
def test_openai_keeps_the_risk_and_its_stream_helper_does_not_add_spans_up(url: str, report: dict[str, Any]) -> None:
    client: Any = OpenAI(base_url=url, api_key="none", max_retries=0)
    whole = client.chat.completions.create(**ASKED)
    with client.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
        joined = stream.get_final_completion()
    for answer in (whole, joined):
        [choice] = answer.choices
        assert choice.message.cocoa_risk == report
        assert choice.message.content == "".join(span["text"] for span in report["spans"])
        assert answer.usage.completion_tokens_details.cocoa_max_risk == report["max_risk"]
    assert whole.choices[0].logprobs.cocoa_risk == report
    assert joined.choices[0].message.cocoa_spans == report["spans"]
    stream = client.chat.completions.create(**ASKED, stream=True)
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert [span for delta in deltas for span in getattr(delta, "cocoa_spans", ())] == report["spans"]
    assert deltas[-1].cocoa_risk == report


async def test_the_asynchronous_stream_helper_joins_two_answers(url: str) -> None:
    asked = {**ASKED, "max_tokens": 400, "n": 2, "seed": 5, "temperature": 1.5}
    async with (
        AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
        client.chat.completions.stream(**asked) as stream,
    ):
        answer = await stream.get_final_completion()
    messages: list[Any] = [choice.message for choice in answer.choices]
    assert messages[0].content != messages[1].content
    for message in messages:
        assert message.cocoa_spans == message.cocoa_risk["spans"]
        assert "".join(span["text"] for span in message.cocoa_spans) == message.content


def test_the_stream_helper_joins_calls_of_tools() -> None:
    says = '<tool_call>\n{"name": "move", "arguments": {"up": true}}\n</tool_call>'
    move = {"name": "move", "parameters": {"type": "object", "properties": {"up": {"type": "boolean"}}}}
    asked = {**ASKED, "max_tokens": 200, "tools": [{"type": "function", "function": move}]}
    with (
        serving(speaker(says, template=tool_templates.HERMES)) as url,
        OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        client.chat.completions.stream(**asked) as stream,
    ):
        message: Any = stream.get_final_completion().choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("move", '{"up": true}')
    [measured] = message.cocoa_risk["tool_calls"]
    assert (measured["name"], list(measured["arguments"])) == ("move", ["up"])


async def test_the_model_of_langchain_keeps_the_copy_in_logprobs(url: str, report: dict[str, Any]) -> None:
    options: Any = {"api_key": "none", "model": "any", "max_tokens": LIMIT, "max_retries": 0}
    chat, asked = ChatOpenAI(base_url=url, **options), HELLO[0]["content"]
    whole = chat.invoke(asked)
    assert whole.response_metadata["logprobs"]["cocoa_risk"] == report
    details = whole.response_metadata["token_usage"]["completion_tokens_details"]
    assert details["cocoa_max_risk"] == report["max_risk"]
    for chunks in (list(chat.stream(asked)), [chunk async for chunk in chat.astream(asked)]):
        message: Any = add(chunks)
        assert message.response_metadata["logprobs"]["cocoa_spans"] == report["spans"]
        assert message.response_metadata["logprobs"]["cocoa_risk"] == report


def test_the_model_of_llama_index_keeps_what_was_sent(url: str, report: dict[str, Any]) -> None:
    options = {"is_chat_model": True, "max_tokens": LIMIT, "temperature": 0.0, "max_retries": 0}
    llm: Any = OpenAILike(model="any", api_base=url, api_key="none", **options)
    asked = [ChatMessage(role="user", content=HELLO[0]["content"])]
    assert llm.chat(asked).raw.choices[0].message.cocoa_risk == report
    deltas = [choice.delta for part in llm.stream_chat(asked) for choice in part.raw.choices]
    assert [span for delta in deltas for span in getattr(delta, "cocoa_spans", ())] == report["spans"]
    assert deltas[-1].cocoa_risk == report
