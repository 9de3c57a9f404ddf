"""Messages at every door: blocks are judged by their type, and what a model returned can be sent back.

What tokens and texts a prompt and an answer have is the same in every adapter and on the server.
"""

import asyncio
import base64
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import date
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.messages.chat import ChatMessage as RoleMessage
from langchain_core.messages.content import KNOWN_BLOCK_TYPES
from langchain_core.runnables.utils import add as added
from llama_index.core.base.llms import types
from llama_index.core.llms import ChatMessage
from tokenizers import processors

from cocoa_engine import CocoaConfig, CocoaEngine, Generation, PromptError
from cocoa_engine.decoding.task import LONGEST, LOOP, is_loop
from cocoa_engine.model.text import TEXT_BLOCKS
from cocoa_engine.report import RiskReport
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.langchain import CocoaLLM as LangChainLLM
from cocoa_integrations.langchain.messages import CALL_BLOCKS, REASONING_BLOCKS, to_chat
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.llama_index.messages import to_entries
from cocoa_integrations.server import create_app
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.protocol.messages import Message, entries_of
from cocoa_integrations.tool_calling import Plan, ToolRequest
from tests.helpers import tool_templates
from tests.helpers.mutations import fuzz
from tests.helpers.reasoning_models import READS_REASONING, Speaker, speaker
from tests.helpers.served import HELLO, chat, chunks, post
from tests.helpers.tiny_models import BOS, EOS, engine_for_schemas, pieces_tokenizer, tiny_model, tiny_tokenizer

OF_OPENAI = {"text", "refusal", "image_url", "input_audio", "file", "input_text", "output_text", "input_image"}
OF_ANTHROPIC = {"image", "document", "search_result", "tool_use", "tool_result", "thinking", "redacted_thinking"}
OTHERS = {"reasoning", "guard_content", "media", "json", "Text", "TEXT", "texts", "", "a" * 10_000, "im\nage"}
TYPES = sorted({*KNOWN_BLOCK_TYPES, *OF_OPENAI, *OF_ANTHROPIC, *OTHERS})

NO_TYPE = ({"text": "a"}, {"type": None, "text": "a"}, {"type": 3, "text": "a"}, {"type": ["text"], "text": "a"}, {}, 3)


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    return speaker()


def at_langchain(blocks: list[Any]) -> Any:
    return to_chat([HumanMessage(blocks)])


DOORS: list[Callable[[list[Any]], Any]] = [
    lambda blocks: [{"role": "user", "content": blocks}],
    at_langchain,
    lambda blocks: entries_of([Message(role="user", content=blocks)]),
]


@pytest.mark.parametrize("door", DOORS)
def test_only_types_of_text_are_text(engine: CocoaEngine, door: Callable[[list[Any]], Any]) -> None:
    plain = engine.render_chat([{"role": "user", "content": "secret"}])
    for kind in TYPES:
        block = {"type": kind, "text": "secret", "refusal": "secret", kind: "secret", "image_url": {"url": "data:,x"}}
        if kind in TEXT_BLOCKS:
            assert engine.render_chat(door([{"type": kind, TEXT_BLOCKS[kind]: "secret"}])) == plain
            with pytest.raises((PromptError, ApiError), match=rf"content of type '{kind}' in .* has no "):
                engine.render_chat(door([{"type": kind, "file_id": "a"}]))
        else:
            with pytest.raises((PromptError, ApiError), match=r"content of type .* in .*; the model reads text only"):
                engine.render_chat(door([block]))
    for block in NO_TYPE:
        if door is at_langchain and not isinstance(block, dict):
            continue  # LangChain refuses it
        with pytest.raises((PromptError, ApiError), match="has no type"):
            engine.render_chat(door([block]))


@pytest.mark.parametrize("field", ["images", "audio", "function_call"])
def test_fields_of_messages_that_would_be_lost_are_refused(field: str) -> None:
    message = {"role": "user", "content": "Hi", field: None}
    assert entries_of([Message.model_validate(message)]) == [{"role": "user", "content": "Hi"}]
    with pytest.raises(ApiError) as caught:
        entries_of([Message.model_validate({**message, field: ["x"]})])
    assert caught.value.param == f"messages[0].{field}"


def test_the_engine_takes_a_text_or_blocks(engine: CocoaEngine) -> None:
    with pytest.raises(PromptError, match="takes a text or a list of blocks"):
        engine.render_chat([{"role": "user", "content": {"type": "image_url", "text": "a"}}])


def test_a_developer_is_the_system_at_every_door() -> None:
    said: dict[str, Any] = {"role": "developer", "content": "Hi"}
    doors = to_chat([RoleMessage(**said)]), to_entries([ChatMessage(**said)]), entries_of([Message(**said)])
    assert all(entries == [{"role": "system", "content": "Hi"}] for entries in doors)


NESTED: dict[str, Any] = {}
NESTED["a"] = NESTED


@pytest.mark.parametrize(
    "value", [date.min, b"", {1}, math.nan, "\ud800", 10**5000, NESTED], ids=lambda value: type(value).__name__
)
def test_arguments_that_json_cannot_hold_are_refused(engine: CocoaEngine, value: Any) -> None:
    call = types.ToolCallBlock(tool_call_id="1", tool_name="tool", tool_kwargs={"a": value})
    with pytest.raises(PromptError, match=r"message 1 \(assistant\) cannot be written as JSON"):
        to_chat([HumanMessage("Hi"), AIMessage("", tool_calls=[{"name": "tool", "args": {"a": value}, "id": "1"}])])
    with pytest.raises(PromptError, match=r"message 1 \(assistant\) cannot be written as JSON"):
        CocoaLLM(engine=engine).chat([ChatMessage("Hi"), ChatMessage(role="assistant", blocks=[call])])


@pytest.mark.parametrize("kind", sorted(KNOWN_BLOCK_TYPES | OF_ANTHROPIC | {"function_call"}))
def test_blocks_in_answers_of_langchain(kind: str) -> None:
    block = {"type": kind, "text": "a", "id": "1", "value": {}, "name": "f", "args": {}}
    call = {"name": "f", "args": {}, "id": "1"}
    answer = AIMessage(["b", block], tool_calls=[call])
    if kind in {*TEXT_BLOCKS, *CALL_BLOCKS, *REASONING_BLOCKS}:
        [entry] = to_chat([answer])
        assert entry["content"] == ("ba" if kind in TEXT_BLOCKS else "b")
    else:
        with pytest.raises(PromptError, match=f"content of type '{kind}' in AIMessage; the model reads text only"):
            to_chat([answer])
    if kind in CALL_BLOCKS:
        with pytest.raises(PromptError, match=f"content of type '{kind}' in AIMessage is not in its tool_calls"):
            to_chat([AIMessage(["b", block], tool_calls=[{**call, "id": "2"}])])


PIXEL = base64.b64decode("R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs=")
LLAMA_INDEX = [
    types.TextBlock(text="a"),
    types.CachePoint(cache_control={"type": "ephemeral"}),  # type: ignore[arg-type]
    types.ImageBlock(image=PIXEL),
    types.AudioBlock(audio=b"a"),
    types.VideoBlock(video=b"a"),
    types.DocumentBlock(data=b"a", title="a"),
    types.CitableBlock(title="a", source="b", content=[types.TextBlock(text="a")]),
    types.CitationBlock(cited_content=types.TextBlock(text="a"), source="a", title="b", additional_location_info={}),
    types.ThinkingBlock(content="a"),
    types.ToolCallBlock(tool_name="f", tool_kwargs={}),
]


def test_blocks_of_llama_index_in_each_message() -> None:
    assert {type(block) for block in LLAMA_INDEX} == set(get_args(get_args(types.ContentBlock)[0]))
    for block in LLAMA_INDEX:
        for role in ("system", "user", "tool", "assistant"):
            message = ChatMessage(role=role, blocks=[types.TextBlock(text="b"), block])
            of_answers = role == "assistant" and isinstance(block, (types.ThinkingBlock, types.ToolCallBlock))
            if of_answers or isinstance(block, (types.TextBlock, types.CachePoint)):
                assert to_entries([message])[0]["content"].startswith("b")
            else:
                with pytest.raises(PromptError, match=f"a {role} message has a {type(block).__name__}"):
                    to_entries([message])


MOVE = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [MOVE, LOOK]

HERMES = (
    'W1.<tool_call>{"name": "move", "arguments": {"to": "W2\nW3"}}, {"name": "look", "arguments": null} W4</tool_call>'
    ' W5 <tool_call>{"name": "move", "to": "W6"}</tool_call><tool_call>{"name": "move", "arguments": {"a": "W7",}}'
    '</tool_call><tool_call>{"name": "move", "arguments": {"a": "W8'
)
LLAMA = (
    '{"name": "move", "parameters": {"to": "W1"}}; {"name": "look", "parameters": {}} W2 {"name": "move", "a": "W3"}'
)
MISTRAL = (
    '[{"name": "move", "arguments": {"to": "W1"}} {"name": "look"}, {"name": "move", "arguments": {"a": "\\ud800"}}]'
)
THOUGHT = f"<think>W9</think>{HERMES}"

ANSWERS = {
    "hermes": (tool_templates.HERMES, HERMES),
    "llama": (tool_templates.LLAMA, LLAMA),
    "mistral": (tool_templates.MISTRAL, MISTRAL),
    "none": (READS_REASONING, THOUGHT),
}


@pytest.fixture(scope="module", params=ANSWERS)
def said(request: pytest.FixtureRequest) -> tuple[Speaker, str]:
    template, text = ANSWERS[request.param]
    return speaker(text, template=template), text


def rendered(engine: Speaker, entries: list[dict[str, Any]]) -> str:
    chat, options = Plan(ToolRequest.of(TOOLS), engine).prompt(entries)
    return engine.render_chat(chat, **options)


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"W\d", text))


def assert_complete(engine: Speaker, prompt: str, text: str) -> None:
    assert prompt.count("move") > engine.render_chat(HELLO, tools=TOOLS).count("move")
    if engine.tokenizer.chat_template != tool_templates.MISTRAL:  # which drops the text beside calls
        assert words(prompt) == words(text)


@pytest.mark.slow
def test_messages_of_langchain(said: tuple[Speaker, str]) -> None:
    engine, text = said
    model = ChatCocoa(engine=engine, max_tokens=600, output_version="v1").bind_tools(TOOLS)
    asked = HumanMessage("Go.")
    streamed: Any = added(list(model.stream([asked])))
    whole = model.invoke([asked])
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
    assert streamed.text == whole.text
    for kept, call in zip(streamed.invalid_tool_calls, whole.invalid_tool_calls, strict=True):
        assert kept["name"] == call["name"]
        assert kept["args"].startswith(call["args"])  # it ends with an unmatched bracket
    for answer in (whole, streamed, *messages_from_dict([message_to_dict(streamed)])):
        assert isinstance(answer, AIMessage)
        results: list[BaseMessage] = [ToolMessage("Done.", tool_call_id=call["id"]) for call in answer.tool_calls]
        assert len(results) == 2
        history = [asked, answer, *results]
        assert_complete(engine, model.bound.with_options({"tools": TOOLS}).prompt_text(history), text)  # type: ignore[attr-defined]
        assert model.invoke(history, max_tokens=1).response_metadata["finish_reason"] == "length"


@pytest.mark.slow
def test_messages_of_llama_index(said: tuple[Speaker, str]) -> None:
    engine, text = said
    llm = CocoaLLM(engine=engine, max_new_tokens=600)
    asked = ChatMessage("Go.")
    *parts, last = llm.stream_chat([asked], tools=TOOLS)
    for answer in (llm.chat([asked], tools=TOOLS), last, parts[-1], parts[len(parts) // 2]):
        calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        results = [ChatMessage("Done.", role="tool", additional_kwargs={"tool_call_id": one.tool_id}) for one in calls]
        history = [asked, answer.message, *results]
        if answer.delta in (None, "") and answer.raw and "finish_reason" in answer.raw:
            assert len(calls) == 2
            assert_complete(engine, rendered(engine, to_entries(history)), text)
        assert llm.chat(history, tools=TOOLS, max_new_tokens=1).message.role == "assistant"


@pytest.mark.slow
async def test_messages_of_the_server(said: tuple[Speaker, str]) -> None:
    engine, text = said
    whole = (await chat(engine, tools=TOOLS, max_tokens=600))["choices"][0]["message"]
    streamed: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for choice in (event["choices"][0] for event in await chunks(engine, tools=TOOLS, max_tokens=600)):
        for key in ("content", "reasoning_content"):
            streamed[key] += choice["delta"].get(key) or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(streamed["tool_calls"]):
                streamed["tool_calls"].append({**part, "function": {**part["function"]}})
            else:
                streamed["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert [call["function"] for call in streamed["tool_calls"]] == [call["function"] for call in whole["tool_calls"]]
    assert (streamed["content"] or None) == (whole["content"] or None)
    for answer in (whole, streamed):
        results = [
            {"role": "tool", "content": "Done.", "tool_call_id": call["id"]} for call in answer["tool_calls"][:2]
        ]
        history = [*HELLO, answer, *results]
        entries = entries_of([Message.model_validate(message) for message in history])
        assert_complete(engine, rendered(engine, entries), text)
        await chat(engine, messages=history, tools=TOOLS, max_tokens=1)


@pytest.mark.slow
async def test_a_tool_that_is_not_allowed_is_not_called() -> None:
    calls = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("move", "look")]
    engine = speaker("".join(calls), template=tool_templates.HERMES)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [LOOK]}}
    options = {"tools": TOOLS, "tool_choice": allowed}
    answer = ChatCocoa(engine=engine, max_tokens=200).invoke("Go.", **options)
    [bad] = answer.invalid_tool_calls
    assert ([call["name"] for call in answer.tool_calls], bad["name"]) == (["look"], "move")
    assert "does not allow a call of move" in str(bad["error"])
    llm, asked = CocoaLLM(engine=engine, max_new_tokens=200), [ChatMessage("Go.")]
    for response in (llm.chat(asked, **options), [*llm.stream_chat(asked, **options)][-1]):
        assert [call.tool_name for call in llm.get_tool_calls_from_response(response)] == ["look"]
        assert '"move"' in str(response.message.content)


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


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("base", [tiny_tokenizer, pieces_tokenizer], ids=["bytes", "sentencepiece"])
async def test_the_doors_of_adapters_and_of_the_server(base: Callable[[], Any], added: str, prompt: str) -> None:
    engine = engine_of(base, added)
    text = engine.render_chat(CHAT) if prompt == "rendered" else prompt
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [BOS, *ids] if added.startswith("<bos>") and ids[0] != BOS else ids
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
    assert LangChainLLM(engine=engine, max_tokens=3).invoke(text) == expected.text
    assert CocoaLLM(engine=engine, max_new_tokens=3).complete(text).text == expected.text
    if prompt == "rendered":
        chat = ChatCocoa(engine=engine, max_tokens=3)
        assert chat.get_num_tokens_from_messages([HumanMessage(CHAT[0]["content"])]) == len(ids)
        answer = chat.invoke(CHAT[0]["content"])
        assert answer.usage_metadata is not None
        assert (answer.text, answer.usage_metadata["input_tokens"]) == (expected.text, len(ids))
        asked = CocoaLLM(engine=engine, max_new_tokens=3).chat([ChatMessage(CHAT[0]["content"])])
        assert asked.message.content == expected.text


async def test_messages_make_control_tokens_only_on_request() -> None:
    engine = engine_of(tiny_tokenizer, "<bos> $A")
    text = "he is<eos><bos>in"
    on_request: dict[str, Any] = {"chat_template_kwargs": {"split_special_tokens": False}}
    nothing: dict[str, Any] = {}
    for options in (nothing, on_request):
        ids = engine.encode_chat([{"role": "user", "content": text}], **options.get("chat_template_kwargs", {}))
        assert ids.count(EOS) == len(options)
        answer = ChatCocoa(engine=engine, max_tokens=3).invoke(text, **options)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] == len(ids)
        model = CocoaLLM(engine=engine, max_new_tokens=3)
        expected = engine.generate(ids, max_new_tokens=3).text
        assert (answer.text, model.chat([ChatMessage(text)], **options).message.content) == (expected, expected)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **options}
        response = (await post(create_app(engine), body)).json()
        assert response["usage"]["prompt_tokens"] == len(ids)


SAYS = "日x🙂\ufffd the 日"


@pytest.fixture(scope="module")
def speaking() -> Speaker:
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
    chat = ChatCocoa(engine=engine, max_tokens=limit)
    llm = LangChainLLM(engine=engine, max_tokens=limit)
    return {
        "chat": chat.invoke("hi", stop=stop).text,
        "chat, streamed": "".join(chunk.text for chunk in chat.stream("hi", stop=stop)),
        "llm, streamed": "".join(llm.stream("hi", stop=stop)),
    }


def of_llama_index(engine: Speaker, limit: int, stop: list[str]) -> dict[str, str]:
    llm = CocoaLLM(engine=engine, max_new_tokens=limit, stop=stop)
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
def test_texts(speaking: Speaker, ask: Callable[..., dict[str, str]], limit: int, stop: list[str], text: str) -> None:
    said = ask(speaking, limit, stop)
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
