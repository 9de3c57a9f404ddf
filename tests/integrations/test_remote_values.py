"""Answers of a server with missing fields and values of wrong types: an answer, or one error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import httpx
import pytest

from cocoa_engine.errors import DataError
from cocoa_integrations.server import create_app
from tests.helpers.mutations import EXAMPLES, each_change, outcome
from tests.helpers.remote import listening
from tests.helpers.structured import engine_for_schemas

pytest.importorskip("langchain_openai")
pytest.importorskip("llama_index.llms.openai_like")

from llama_index.core.llms import ChatMessage

from cocoa_integrations.langchain import ChatCocoaRemote
from cocoa_integrations.llama_index import CocoaRemote

BODY = {
    "model": "cocoa",
    "messages": [{"role": "user", "content": "Who invented the telephone?"}],
    "max_tokens": 3,
    "logprobs": True,
    "top_logprobs": 1,
    "cocoa": {"candidates": True},
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ERROR = {"name": "add", "id": "1", "risk": 0.5, "arguments": {}, "error": "cut off"}

STEP = 1 if EXAMPLES else 5
"""Every which change is tried. The number of other values of each part has no common factor with it."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(create_app(engine_for_schemas())) as url:
        yield url


@pytest.fixture(scope="module")
def whole(url: str) -> Any:
    response = httpx.post(f"{url}/chat/completions", json=BODY, timeout=60).json()
    message = response["choices"][0]["message"]
    message["tool_calls"] = [CALL]
    message["cocoa_risk"]["tool_calls"] = [ERROR]
    return response


@pytest.fixture(scope="module")
def chunks(url: str) -> list[Any]:
    """The first and the last chunks of a stream, which have one of each kind."""
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(f"{url}/chat/completions", json=body, timeout=60).text
    sent = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    sent[1]["choices"][0]["delta"]["tool_calls"] = [{**CALL, "index": 0}]
    return [*sent[:2], *sent[-2:]]


def answering(content: Callable[[], Any], *, stream: bool = False) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        if stream:
            events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in content())
            return httpx.Response(200, text=f"{events}data: [DONE]\n\n", headers={"content-type": "text/event-stream"})
        return httpx.Response(200, text=json.dumps(content()), headers={"content-type": "application/json"})

    return httpx.Client(transport=httpx.MockTransport(answer))


def langchain(client: httpx.Client) -> Callable[[bool], Any]:
    chat = ChatCocoaRemote(http_client=client, max_retries=0)
    return lambda stream: list(chat.stream("Hi")) if stream else chat.invoke("Hi")


def llama_index(client: httpx.Client) -> Callable[[bool], Any]:
    llm = CocoaRemote(http_client=client, max_retries=0, logprobs=True)
    messages = [ChatMessage("Hi")]
    return lambda stream: list(llm.stream_chat(messages)) if stream else llm.chat(messages)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("framework", [langchain, llama_index])
def test_each_value_of_an_answer(
    framework: Callable[[httpx.Client], Callable[[bool], Any]], stream: bool, whole: Any, chunks: list[Any]
) -> None:
    good = chunks if stream else whole
    sent = [good]
    ask = framework(answering(lambda: sent[0], stream=stream))
    assert ask(stream)
    refused = 0
    for what, value in islice(_changes(good, stream), 0, None, STEP):
        sent[0] = value
        try:
            found = outcome(lambda: ask(stream))
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        refused += isinstance(found, DataError)
    assert refused > 100


def _changes(good: Any, stream: bool) -> Iterator[tuple[str, Any]]:
    if not stream:
        yield from each_change(good)
        return
    for number, chunk in enumerate(good):
        for what, value in each_change(chunk):
            yield f"{what} in chunk {number}", [*good[:number], value, *good[number + 1 :]]


@pytest.mark.parametrize("framework", [langchain, llama_index])
@pytest.mark.parametrize("text", ["{", "[" * 100_000, '"\xff"'])
def test_an_answer_that_is_no_json(framework: Callable[[httpx.Client], Callable[[bool], Any]], text: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        kind = "text/event-stream" if json.loads(request.content).get("stream") else "application/json"
        body = f"data: {text}\n\n" if kind.startswith("text") else text
        return httpx.Response(200, content=body.encode("latin-1"), headers={"content-type": kind})

    ask = framework(httpx.Client(transport=httpx.MockTransport(answer)))
    for stream in (False, True):
        with pytest.raises(DataError, match="no JSON"):
            ask(stream)


def test_each_value_of_the_list_of_models() -> None:
    good = {"object": "list", "data": [{"id": "cocoa", "object": "model", "max_model_len": 512}]}
    sent = [good]
    client = answering(lambda: sent[0])
    assert CocoaRemote(http_client=client).metadata.context_window == 512
    refused = 0
    for what, value in each_change(good):
        sent[0] = value
        found = outcome(lambda: CocoaRemote(http_client=client, max_retries=0).metadata)
        refused += isinstance(found, DataError)
        assert isinstance(found, DataError) or found.context_window > 0, what
    assert refused > 50
