"""Every message that a model returns can be sent back: calls, invalid calls, text and reasoning."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.runnables.utils import add as added
from llama_index.core.llms import ChatMessage

from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.llama_index.messages import to_entries as llama_index_entries
from cocoa_integrations.server.protocol.messages import Message, entries_of
from cocoa_integrations.tool_calling import Plan, ToolRequest
from tests.helpers import tool_templates
from tests.helpers.reasoning_models import READS_REASONING
from tests.helpers.served import HELLO, Speaker, chat, chunks, speaker

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
