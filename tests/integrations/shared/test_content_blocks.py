"""Content blocks are judged by their type, at every door: what is not text is refused, whatever else it holds."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, get_args

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.content import KNOWN_BLOCK_TYPES
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
from cocoa_integrations.langchain.messages import CALL_BLOCKS, REASONING_BLOCKS, to_chat
from cocoa_integrations.llama_index.messages import to_entries
from cocoa_integrations.server.errors import ApiError
from cocoa_integrations.server.protocol.messages import Message, entries_of
from tests.helpers.served import speaker

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
