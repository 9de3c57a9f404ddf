"""``logprobs=True, top_logprobs=N`` as OpenAI's clients mean them, in both adapters."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from cocoa_engine import CocoaEngine
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.structured import engine_for_schemas

QUESTION = "Who invented the telephone?"
TOP = 4


@pytest.fixture(scope="module")
def quick() -> CocoaEngine:
    return engine_for_schemas()


@pytest.fixture(scope="module")
def recorded(quick: CocoaEngine) -> list[list[tuple[int, float]]]:
    """The most probable tokens at each place of the answer, by the engine."""
    answer = quick.chat([{"role": "user", "content": QUESTION}], max_new_tokens=12, top_logprobs=TOP)
    return [top for span in answer.spans for top in span.top_log_probs or []]


def values(content: list[dict[str, Any]]) -> list[list[float]]:
    return [[rival["logprob"] for rival in entry["top_logprobs"]] for entry in content]


def test_langchain(quick: CocoaEngine, recorded: list[list[tuple[int, float]]]) -> None:
    chat = ChatCocoa(engine=quick, max_tokens=12)
    message = chat.invoke(QUESTION, logprobs=True, top_logprobs=TOP)
    content = message.response_metadata["logprobs"]["content"]
    places = [[value for _, value in top] for top in recorded]
    assert len(content) > 3
    found = values(content)
    assert [place for place in places if place in found] == found  # places without text are left out
    for entry in content:
        assert len(entry["top_logprobs"]) == TOP
        assert entry["top_logprobs"] == sorted(entry["top_logprobs"], key=lambda rival: -rival["logprob"])
        assert all(set(rival) == {"token", "logprob", "bytes"} for rival in entry["top_logprobs"])
    assert message.response_metadata["cocoa_risk"]["compact"] is True
    assert chat.invoke(QUESTION, top_logprobs=TOP).response_metadata["logprobs"]["content"] == content
    last = list(chat.bind(logprobs=True, top_logprobs=TOP).stream(QUESTION))[-1]
    assert last.response_metadata["logprobs"]["content"] == content
    bare = chat.invoke(QUESTION, logprobs=True).response_metadata["logprobs"]["content"]
    assert values(bare) == [[]] * len(content)


def test_llama_index(quick: CocoaEngine) -> None:
    content = (
        ChatCocoa(engine=quick, max_tokens=12)
        .invoke(QUESTION, top_logprobs=TOP)
        .response_metadata["logprobs"]["content"]
    )
    llm = CocoaLLM(engine=quick, max_new_tokens=12)
    asked = [ChatMessage(content=QUESTION)]
    response = llm.chat(asked, logprobs=True, top_logprobs=TOP)
    assert response.logprobs is not None
    for entry, places in zip(content, response.logprobs, strict=True):
        assert [each.logprob for each in places[:TOP]] == [rival["logprob"] for rival in entry["top_logprobs"]]
        assert [each.token for each in places[:TOP]] == [rival["token"] for rival in entry["top_logprobs"]]
        kept = [each for each in places if (each.token, each.logprob) == (entry["token"], entry["logprob"])]
        assert kept
        assert len(places) == TOP or places[-1] == kept[0]
    streamed = list(llm.stream_chat(asked, top_logprobs=TOP))
    assert streamed[-1].logprobs == response.logprobs
    assert [place for chunk in streamed[:-1] for place in chunk.logprobs or []] == response.logprobs
    assert [len(place) for place in llm.chat(asked, logprobs=True).logprobs or []] == [1] * len(content)


@pytest.mark.parametrize("value", [None, 0])
def test_without_them(quick: CocoaEngine, value: int | None) -> None:
    """Frameworks pass options on that were not given."""
    options = {"top_logprobs": value}
    plain = ChatCocoa(engine=quick, max_tokens=2, **options).invoke(QUESTION, **options)
    assert "logprobs" not in plain.response_metadata
    llm = CocoaLLM(engine=quick, max_new_tokens=2, generate_kwargs=options)
    assert llm.chat([ChatMessage(content=QUESTION)], **options).logprobs is None
