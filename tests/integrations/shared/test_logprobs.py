"""``logprobs=True, top_logprobs=N`` as OpenAI's clients mean them, in both adapters, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from cocoa_engine import CocoaEngine, Generation
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.llama_index import CocoaLLM
from tests.helpers.structured import engine_for_schemas
from tests.helpers.tiny_models import sentencepiece_like_tokenizer, tiny_model, tiny_tokenizer

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
    message = ChatCocoa(engine=quick, max_tokens=12).invoke(QUESTION, top_logprobs=TOP)
    content = message.response_metadata["logprobs"]["content"]
    llm = CocoaLLM(engine=quick, max_new_tokens=12)
    asked = [ChatMessage(content=QUESTION)]
    response = llm.chat(asked, logprobs=True, top_logprobs=TOP)
    assert response.logprobs is not None
    for entry, places in zip(content, response.logprobs, strict=True):
        expected = [(rival["token"], rival["logprob"]) for rival in entry["top_logprobs"]]
        assert [(place.token, place.logprob) for place in places[:TOP]] == expected
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


def check(out: Generation, engine: CocoaEngine) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = TokenLogprobs(engine).of_answer(out.spans)
    assert "".join(entry["token"] for entry in content) == out.text
    assert b"".join(bytes(entry["bytes"]) for entry in content) == out.text.encode()
    return content


def test_of_an_answer_that_ended(engine: CocoaEngine) -> None:
    out = engine.chat([{"role": "user", "content": "Say only the word: yes"}], max_new_tokens=48)
    assert out.finish_reason == "eos"
    content = check(out, engine)
    log_probs = [value for span in out.spans for value in span.token_log_probs]
    assert [entry["logprob"] for entry in content] == log_probs[:-1]  # all but the end token's


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, sentencepiece_like_tokenizer])
@pytest.mark.parametrize("seed", range(4))
def test_of_random_tokens(tokenizer: Callable[[], Any], seed: int) -> None:
    engine = CocoaEngine(tiny_model("llama", seed=seed), tokenizer())
    for prompt in ([5, 6], [70, 80, 90], [33]):
        out = engine.generate(prompt, max_new_tokens=40)
        check(out, engine)
        if len(out.text) > 6:
            check(engine.generate(prompt, max_new_tokens=40, stop=out.text[3:5]), engine)
