"""Messages at every door: blocks are judged by their type, and what a model returned can be sent back."""

import base64
import re
from collections import Counter
from collections.abc import Callable
from datetime import date
from typing import Any, get_args

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.messages.content import KNOWN_BLOCK_TYPES
from langchain_core.runnables.utils import add as added
from llama_index.core.base.llms.types import (
    AudioBlock,
    CachePoint,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)
from llama_index.core.llms import ChatMessage

from cocoa_engine import CocoaEngine, PromptError
from cocoa_engine.model.text import TEXT_BLOCKS
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.langchain.messages import CALL_BLOCKS, REASONING_BLOCKS, to_chat
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.llama_index.messages import to_entries
from cocoa_integrations.llama_index.messages import to_entries as llama_index_entries
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.protocol.messages import Message, entries_of
from cocoa_integrations.tool_calling import Plan, ToolRequest
from tests.helpers import tool_templates
from tests.helpers.reasoning_models import READS_REASONING, Speaker, speaker
from tests.helpers.served import HELLO, chat, chunks

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


NESTED: dict[str, Any] = {}
NESTED["a"] = NESTED


@pytest.mark.parametrize(
    "value", [date.min, b"", {1}, "\ud800", 10**5000, NESTED], ids=lambda value: type(value).__name__
)
def test_arguments_that_json_cannot_hold_are_refused(engine: CocoaEngine, value: Any) -> None:
    call = ToolCallBlock(tool_call_id="1", tool_name="tool", tool_kwargs={"a": value})
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
    TextBlock(text="a"),
    CachePoint(cache_control={"type": "ephemeral"}),  # type: ignore[arg-type]
    ImageBlock(image=PIXEL),
    AudioBlock(audio=b"a"),
    VideoBlock(video=b"a"),
    DocumentBlock(data=b"a", title="a"),
    CitableBlock(title="a", source="b", content=[TextBlock(text="a")]),
    CitationBlock(cited_content=TextBlock(text="a"), source="a", title="b", additional_location_info={}),
    ThinkingBlock(content="a"),
    ToolCallBlock(tool_name="f", tool_kwargs={}),
]


def test_blocks_of_llama_index_in_each_message() -> None:
    assert {type(block) for block in LLAMA_INDEX} == set(get_args(get_args(ContentBlock)[0]))
    for block in LLAMA_INDEX:
        for role in ("system", "user", "tool", "assistant"):
            message = ChatMessage(role=role, blocks=[TextBlock(text="b"), block])
            of_answers = role == "assistant" and isinstance(block, (ThinkingBlock, ToolCallBlock))
            if of_answers or isinstance(block, (TextBlock, CachePoint)):
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
            assert_complete(engine, rendered(engine, llama_index_entries(history)), text)
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
