"""What limits and stops leave of an answer is the same in every adapter and on the server, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from cocoa_integrations import langchain, llama_index
from cocoa_integrations.server import create_app
from tests.helpers.served import Speaker, post, speaker

SAYS = "日x🙂\ufffd the 日"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> Speaker:
    return speaker(SAYS)


def served(engine: Speaker, path: str, **body: Any) -> dict[str, str]:
    """The text of an answer over HTTP, whole and streamed."""
    whole = asyncio.run(post(create_app(engine), body, path)).json()["choices"][0]
    events = asyncio.run(post(create_app(engine), {**body, "stream": True}, path)).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    if "messages" in body:
        streamed = "".join(choice["delta"].get("content") or "" for choice in deltas)
        return {"whole": whole["message"]["content"], "streamed": streamed}
    return {"whole": whole["text"], "streamed": "".join(choice["text"] for choice in deltas)}


def chat_completions(engine: Speaker, limit: int, stop: list[str]) -> dict[str, str]:
    return served(engine, "/v1/chat/completions", messages=HI, max_tokens=limit, stop=stop)


def completions(engine: Speaker, limit: int, stop: list[str]) -> dict[str, str]:
    return served(engine, "/v1/completions", prompt="hi", max_tokens=limit, stop=stop)


def of_langchain(engine: Speaker, limit: int, stop: list[str]) -> dict[str, str]:
    chat = langchain.ChatCocoa(engine=engine, max_tokens=limit)
    llm = langchain.CocoaLLM(engine=engine, max_tokens=limit)
    return {
        "chat": chat.invoke("hi", stop=stop).text,
        "chat, streamed": "".join(chunk.text for chunk in chat.stream("hi", stop=stop)),
        "llm, streamed": "".join(llm.stream("hi", stop=stop)),
    }


def of_llama_index(engine: Speaker, limit: int, stop: list[str]) -> dict[str, str]:
    llm = llama_index.CocoaLLM(engine=engine, max_new_tokens=limit, stop=stop)
    streamed = list(llm.stream_complete("hi"))
    assert "".join(part.delta or "" for part in streamed) == streamed[-1].text
    return {"complete": llm.complete("hi").text, "streamed": streamed[-1].text}


@pytest.mark.parametrize("ask", [chat_completions, completions, of_langchain, of_llama_index])
@pytest.mark.parametrize(
    ("limit", "stop", "text"),
    [
        (2, [], "日x"),
        (3, [], "日x"),
        (4, [], "日x"),
        (5, [], "日x🙂"),
        (6, [], "日x🙂"),
        (8, [], "日x🙂\ufffd"),
        (30, ["\ufffd"], "日x🙂"),
        (30, ["e 日"], "日x🙂\ufffd th"),
    ],
)
def test_texts(engine: Speaker, ask: Callable[..., dict[str, str]], limit: int, stop: list[str], text: str) -> None:
    said = ask(engine, limit, stop)
    assert said == dict.fromkeys(said, text)
