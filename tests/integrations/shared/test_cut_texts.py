"""What limits and stops leave of an answer is the same in every adapter and on the server, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from cocoa_integrations import langchain, llama_index
from cocoa_integrations.server import create_app
from tests.helpers.served import HELLO, Speaker, post, speaker

SAYS = "日x🙂\ufffd the 日"


@pytest.fixture(scope="module")
def engine() -> Speaker:
    return speaker(SAYS)


def of_server(engine: Speaker, limit: int, stop: list[str]) -> dict[str, str]:
    said = {}
    for path, asked in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "hi"})):
        body: dict[str, Any] = {**asked, "max_tokens": limit, "stop": stop}
        [whole] = asyncio.run(post(create_app(engine), body, path)).json()["choices"]
        events = asyncio.run(post(create_app(engine), {**body, "stream": True}, path)).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        parts = [choice.get("delta", choice) for chunk in chunks for choice in chunk["choices"]]
        said[path] = whole["message"]["content"] if "messages" in asked else whole["text"]
        said[f"{path}, streamed"] = "".join(part.get("content") or part.get("text") or "" for part in parts)
    return said


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


@pytest.mark.parametrize("ask", [of_server, of_langchain, of_llama_index])
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
