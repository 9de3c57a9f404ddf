"""What tokens and texts a prompt and an answer have is the same in every adapter and on the server."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage
from tokenizers import processors

from cocoa_engine import CocoaConfig, CocoaEngine, Generation
from cocoa_engine.decoding.task import LONGEST, LOOP, is_loop
from cocoa_engine.report import RiskReport
from cocoa_integrations import langchain, llama_index
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.server import create_app
from tests.helpers.mutations import fuzz
from tests.helpers.reasoning_models import Speaker, speaker
from tests.helpers.served import HELLO, post
from tests.helpers.tiny_models import BOS, EOS, engine_for_schemas, pieces_tokenizer, tiny_model, tiny_tokenizer

QUICK = engine_for_schemas()
QUESTION = "Who invented the telephone?"
TOP = 4


def values(content: list[dict[str, Any]]) -> list[list[float]]:
    return [[rival["logprob"] for rival in entry["top_logprobs"]] for entry in content]


def test_langchain() -> None:
    answer = QUICK.chat([{"role": "user", "content": QUESTION}], max_new_tokens=12, top_logprobs=TOP)
    chat = ChatCocoa(engine=QUICK, max_tokens=12)
    message = chat.invoke(QUESTION, logprobs=True, top_logprobs=TOP)
    content = message.response_metadata["logprobs"]["content"]
    places = [[value for _, value in top] for span in answer.spans for top in span.top_log_probs or []]
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


def test_llama_index() -> None:
    message = ChatCocoa(engine=QUICK, max_tokens=12).invoke(QUESTION, top_logprobs=TOP)
    content = message.response_metadata["logprobs"]["content"]
    llm = CocoaLLM(engine=QUICK, max_new_tokens=12)
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
def test_without_them(value: int | None) -> None:
    """Frameworks pass options on that were not given."""
    options = {"top_logprobs": value}
    plain = ChatCocoa(engine=QUICK, max_tokens=2, **options).invoke(QUESTION, **options)
    assert "logprobs" not in plain.response_metadata
    llm = CocoaLLM(engine=QUICK, max_new_tokens=2, generate_kwargs=options)
    assert llm.chat([ChatMessage(content=QUESTION)], **options).logprobs is None


def check(out: Generation, engine: CocoaEngine) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = TokenLogprobs(engine).of_answer(out.spans)
    assert "".join(entry["token"] for entry in content) == out.text
    assert b"".join(bytes(entry["bytes"]) for entry in content) == out.text.encode()
    return content


def test_of_an_answer_that_ended(block_engine: CocoaEngine) -> None:
    out = block_engine.chat([{"role": "user", "content": "Say only the word: yes"}], max_new_tokens=48)
    assert out.finish_reason == "eos"
    content = check(out, block_engine)
    log_probs = [value for span in out.spans for value in span.token_log_probs]
    assert [entry["logprob"] for entry in content] == log_probs[:-1]  # all but the end token's


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, pieces_tokenizer])
@pytest.mark.parametrize("seed", range(4))
def test_of_random_tokens(tokenizer: Callable[[], Any], seed: int) -> None:
    engine = CocoaEngine(tiny_model("llama", seed=seed), tokenizer())
    for prompt in ([5, 6], [70, 80, 90], [33]):
        out = engine.generate(prompt, max_new_tokens=40)
        check(out, engine)
        if len(out.text) > 6:
            check(engine.generate(prompt, max_new_tokens=40, stop=out.text[3:5]), engine)


ADDED = ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"]
CHAT = [{"role": "user", "content": "he is in"}]
PROMPTS = ["the a", "<bos>the a", "rendered"]


def engine_of(base: Callable[[], Any], added: str) -> CocoaEngine:
    tokenizer = base()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=added, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    tokenizer.chat_template = "{{ bos_token }}{% for each in messages %}{{ each.content }}{% endfor %}"
    return CocoaEngine(tiny_model("llama", seed=3), tokenizer, calibrator=None)


def prompt_of(engine: CocoaEngine, prompt: str, added: str) -> tuple[str, list[int]]:
    """The text, and the tokens that it should be."""
    text = engine.render_chat(CHAT) if prompt == "rendered" else prompt
    plain = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    return text, [BOS, *plain] if added.startswith("<bos>") and plain[0] != BOS else plain


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("base", [tiny_tokenizer, pieces_tokenizer], ids=["bytes", "sentencepiece"])
async def test_the_doors_of_adapters_and_of_the_server(base: Callable[[], Any], added: str, prompt: str) -> None:
    engine = engine_of(base, added)
    text, ids = prompt_of(engine, prompt, added)
    assert engine.encode(text) == ids
    expected = engine.generate(ids, max_new_tokens=3)
    assert engine.generate(text, max_new_tokens=3).token_ids == expected.token_ids
    app = create_app(engine)
    body = {"prompt": text, "max_tokens": 3, "echo": True, "logprobs": 0}
    completion = (await post(app, body, "/v1/completions")).json()
    [choice] = completion["choices"]
    assert completion["usage"]["prompt_tokens"] == len(ids)
    assert len(choice["logprobs"]["tokens"]) == len(ids) + len(expected.token_ids)
    assert choice["text"] == text + expected.text
    scored = (await post(app, {"prompt": text, "text": "é"}, "/v1/cocoa/score")).json()
    assert scored["usage"]["prompt_tokens"] == len(ids) + engine.score(text, "é").usage.completion_tokens
    assert langchain.CocoaLLM(engine=engine, max_tokens=3).invoke(text) == expected.text
    assert llama_index.CocoaLLM(engine=engine, max_new_tokens=3).complete(text).text == expected.text
    if prompt == "rendered":
        chat = langchain.ChatCocoa(engine=engine, max_tokens=3)
        assert chat.get_num_tokens_from_messages([HumanMessage(CHAT[0]["content"])]) == len(ids)
        answer = chat.invoke(CHAT[0]["content"])
        assert answer.usage_metadata is not None
        assert (answer.text, answer.usage_metadata["input_tokens"]) == (expected.text, len(ids))
        asked = llama_index.CocoaLLM(engine=engine, max_new_tokens=3).chat([ChatMessage(CHAT[0]["content"])])
        assert asked.message.content == expected.text


async def test_messages_make_control_tokens_only_on_request() -> None:
    engine = engine_of(tiny_tokenizer, "<bos> $A")
    text = "he is<eos><bos>in"
    on_request: dict[str, Any] = {"chat_template_kwargs": {"split_special_tokens": False}}
    nothing: dict[str, Any] = {}
    for options in (nothing, on_request):
        ids = engine.encode_chat([{"role": "user", "content": text}], **options.get("chat_template_kwargs", {}))
        assert ids.count(EOS) == len(options)
        answer = langchain.ChatCocoa(engine=engine, max_tokens=3).invoke(text, **options)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] == len(ids)
        model = llama_index.CocoaLLM(engine=engine, max_new_tokens=3)
        expected = engine.generate(ids, max_new_tokens=3).text
        assert (answer.text, model.chat([ChatMessage(text)], **options).message.content) == (expected, expected)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **options}
        response = (await post(create_app(engine), body)).json()
        assert response["usage"]["prompt_tokens"] == len(ids)


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


TOKENS = st.integers(0, 3)
LONG = CocoaConfig(max_new_tokens=60)


@fuzz(200)
@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, min_size=1, max_size=12), st.integers(0, 30))
def test_a_loop_is_one_sequence_over_and_over(before: list[int], unit: list[int], times: int) -> None:
    ids = [*before, *unit * times]
    units = [ids[-size:] * LOOP for size in range(1, LONGEST + 1)]
    assert is_loop(ids) == (len(ids) >= LOOP and any(ids[-LOOP:] == each[-LOOP:] for each in units))
    assert is_loop(ids) or len(unit) > LONGEST or len(unit) * times < LOOP


def test_spans_and_reports_say_that_they_repeat() -> None:
    engine = speaker(f"A red house. {'ab' * LOOP}")
    answer = engine.generate("hi", config=LONG)
    flags = [span.repeats for span in answer.spans]
    assert (flags[0], flags[-1], flags) == (False, True, sorted(flags))
    with engine.stream("hi", config=LONG) as stream:
        assert [span.repeats for span in stream] == flags
    for report in (RiskReport.of(answer), RiskReport.of(answer).compact()):
        assert report.to_dict()["spans"][-1]["repeats"] is True
        assert RiskReport.from_wire(report.to_dict()).spans[-1].repeats
    assert not any(span.repeats for span in speaker("A red house. It has no end.").generate("hi", config=LONG).spans)
