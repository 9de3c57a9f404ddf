"""Reasoning models: what they think is a block of its own, and neither called, nor counted, nor shown as the answer."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatResponse, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.tools import FunctionTool
from packaging.version import Version

from cocoa_engine import CocoaEngine, ConfigError, PromptError
from cocoa_integrations.llama_index import (
    CocoaLLM,
    RiskChatEngine,
    RiskQueryEngine,
    argument_risks,
    collect_risk,
    field_risks,
)
from tests.helpers.alike import close
from tests.helpers.reasoning_models import HYBRID, READS_REASONING, reasoning_engine, saying
from tests.helpers.reports import without_run

THOUGHT = 'I could <tool_call>{"name":"get_weather","arguments":{}}</tool_call> but…'
TEXT = f"{THOUGHT}</think>\n\nHello!"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
HI = [ChatMessage(content="Hi")]
TAGS = ["text", "added", "special"]


def get_weather() -> str:
    """Get the weather."""
    return "Sunny."


TOOL = FunctionTool.from_defaults(get_weather)
TOOLS = [TOOL.metadata.to_openai_tool()]


@pytest.fixture(scope="module")
def engines() -> dict[str, CocoaEngine]:
    return {tags: reasoning_engine(tags=tags) for tags in TAGS}


@pytest.fixture
def thinker(engines: dict[str, CocoaEngine]) -> CocoaLLM:
    options = saying(engines["text"], TEXT)
    every_call = {"logits_processor": options.pop("logits_processor")}
    return CocoaLLM(engine=engines["text"], generate_kwargs=every_call, **options)


def parts(response: ChatResponse) -> list[tuple[type, Any]]:
    return [(type(block), getattr(block, "text", getattr(block, "content", None))) for block in response.message.blocks]


@pytest.mark.slow
@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
def test_nothing_is_called_before_the_end_of_the_reasoning(
    engines: dict[str, CocoaEngine], tags: str, tools: dict[str, Any]
) -> None:
    llm = CocoaLLM(engine=engines[tags], risk_metadata="full")
    options = {**tools, **saying(engines[tags], TEXT)}
    response = llm.chat(HI, **options)
    assert parts(response) == [(ThinkingBlock, THOUGHT), (TextBlock, "Hello!")]
    assert response.message.content == "Hello!"
    chunks = list(llm.stream_chat(HI, **options))
    for chunk in chunks:
        assert llm.get_tool_calls_from_response(chunk, error_on_no_tool_call=False) == []
    assert "".join(str(chunk.delta) for chunk in chunks) == "Hello!"
    assert "".join(chunk.additional_kwargs.get("thinking_delta", "") for chunk in chunks) == THOUGHT
    assert len([chunk for chunk in chunks if chunk.delta]) > 1
    assert parts(chunks[-1]) == parts(response)
    streamed = [span for chunk in chunks for span in chunk.additional_kwargs.get("cocoa_spans", ())]
    assert close(streamed, response.additional_kwargs["cocoa_spans"])
    assert close(chunks[-1].additional_kwargs["cocoa_risk"], response.additional_kwargs["cocoa_risk"])


def test_a_call_after_the_reasoning(thinker: CocoaLLM) -> None:
    options = saying(thinker.engine, f"{THOUGHT}</think>\n\nI look.\n{CALL}")
    chunks = list(thinker.stream_chat_with_tools([TOOL], user_msg="Hi", **options))
    for response in (thinker.chat_with_tools([TOOL], user_msg="Hi", **options), chunks[-1]):
        [call] = thinker.get_tool_calls_from_response(response)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {})
        assert [type(block) for block in response.message.blocks] == [ThinkingBlock, TextBlock, ToolCallBlock]
        assert response.message.content == "I look.\n"
        assert [entry["id"] for entry in response.additional_kwargs["cocoa_risk"]["tool_calls"]] == [call.tool_id]
    assert "".join(str(chunk.delta) for chunk in chunks) == "I look.\n"


def test_the_risk_is_that_of_the_answer(thinker: CocoaLLM) -> None:
    with collect_risk() as reports:
        response = thinker.chat(HI, risk_metadata="full")
    report = response.additional_kwargs["cocoa_risk"]
    assert without_run(reports) == [report]
    assert response.raw is not None
    assert response.raw["cocoa_risk"] == report
    by_part = {part: [span for span in report["spans"] if span["part"] == part] for part in ("reasoning", "answer")}
    assert report["max_risk"] == max(span["risk"] for span in by_part["answer"])
    assert report["reasoning"]["max_risk"] == max(span["risk"] for span in by_part["reasoning"])
    block = response.message.blocks[0]
    assert isinstance(block, ThinkingBlock)
    assert 0 < block.num_tokens < response.raw["usage"]["completion_tokens"]  # type: ignore[operator]


def test_a_prompt_that_was_formatted_by_hand(engines: dict[str, CocoaEngine]) -> None:
    engine = engines["text"]
    llm = CocoaLLM(engine=engine, messages_to_prompt=lambda messages: f"{messages[0].content}\n<think>\n")
    assert parts(llm.chat(HI, **saying(engine, TEXT))) == [(ThinkingBlock, THOUGHT), (TextBlock, "Hello!")]
    for option in ({"continue_final_message": True}, {"enable_thinking": False}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(ConfigError, match="leave out messages_to_prompt"):
            llm.chat(HI, **option)
    assert llm.complete("Hi", **saying(engine, TEXT)).text == TEXT


@pytest.mark.skipif(
    Version(version("llama-index-core")) < Version("0.14.24"),
    reason="older chat engines cannot stream a message that has several blocks",
)
def test_chat_engines_keep_the_answer(thinker: CocoaLLM) -> None:
    chat_engine = RiskChatEngine(SimpleChatEngine.from_defaults(llm=thinker))
    response = chat_engine.chat("Hi")
    assert response.response == "Hello!"  # type: ignore[union-attr]
    again = chat_engine.stream_chat("Again")  # with the reasoning in its history
    assert "".join(again.response_gen) == "Hello!"
    for metadata in (response.metadata, again.metadata):
        assert metadata["cocoa_risk"]["reasoning"]["max_risk"] > 0  # type: ignore[index]
    assert [message.content for message in chat_engine.chat_history] == ["Hi", "Hello!", "Again", "Hello!"]


def test_reasoning_of_the_history_does_not_reach_the_prompt(thinker: CocoaLLM) -> None:
    said = [ThinkingBlock(content="Secret."), TextBlock(text="Hello!")]
    history = [*HI, ChatMessage(role=MessageRole.ASSISTANT, blocks=said), *HI]
    plain = [*HI, ChatMessage(role=MessageRole.ASSISTANT, content="Hello!"), *HI]
    usage = [thinker.chat(messages).raw["usage"]["prompt_tokens"] for messages in (history, plain)]  # type: ignore[index]
    assert usage[0] == usage[1]
    with pytest.raises(PromptError, match="a user message has a ThinkingBlock"):
        thinker.chat([ChatMessage(role=MessageRole.USER, blocks=said)])
    engine = reasoning_engine(READS_REASONING)
    reads = CocoaLLM(engine=engine, max_new_tokens=4)
    more = [reads.chat(messages).raw["usage"]["prompt_tokens"] for messages in (history, plain)]  # type: ignore[index]
    assert more[0] - more[1] == len(engine.encode("<think>Secret.</think>", add_special_tokens=False))


def test_thinking_is_switched_off_by_the_constructor_or_a_call() -> None:
    engine = reasoning_engine(HYBRID)
    llm, off = (CocoaLLM(engine=engine, max_new_tokens=4, enable_thinking=given) for given in (None, False))

    def prompt_tokens(model: CocoaLLM, **options: Any) -> int:
        return int(model.chat(HI, **options).raw["usage"]["prompt_tokens"])  # type: ignore[index]

    more = len(engine.encode("<think>\n\n</think>\n\n", add_special_tokens=False))
    assert prompt_tokens(llm, enable_thinking=False) == prompt_tokens(off) == prompt_tokens(llm) + more
    assert prompt_tokens(llm, chat_template_kwargs={"enable_thinking": False}) == prompt_tokens(off)
    assert prompt_tokens(off, enable_thinking=True) == prompt_tokens(llm)
    with pytest.raises(ConfigError, match="unknown option 'enable_thinking'"):
        llm.complete("Hi", enable_thinking=False)
    with pytest.raises(ConfigError, match="not tools"):
        llm.chat(HI, chat_template_kwargs={"tools": []})


def test_fields_after_the_reasoning(engines: dict[str, CocoaEngine]) -> None:
    engine = engines["text"]
    options = {**saying(engine, "Up {or} down?</think>\n", ends=False), "max_new_tokens": 200}
    schema = {"type": "object", "properties": {"up": {"type": "boolean"}}, "required": ["up"]}
    asked = {"type": "json_schema", "json_schema": {"name": "Move", "schema": schema}}
    llm = CocoaLLM(engine=engine)
    with collect_risk() as reports:
        response = llm.chat(HI, response_format=asked, **options)
        last = list(llm.stream_chat(HI, response_format=asked, **options))[-1]
    for each, report in zip((response, last), reports, strict=True):
        [(path, field)] = field_risks(each).items()
        text = "".join(span["text"] for span in report.to_dict()["spans"])
        assert path == "$.up"
        assert json.loads(text[field.start : field.end]) == json.loads(str(each.message.content))["up"]
        assert close(report.fields, field_risks(each))

    class AsksForJson(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            return str(llm.chat(HI, response_format=asked, **options).message.content)

    shown = RiskQueryEngine(AsksForJson()).query("Hi")
    metadata = shown.metadata or {}
    assert metadata["cocoa_risk"]["model_name"] == "thinker"
    assert metadata["cocoa_risk"]["run_id"] == metadata["cocoa_reports"][0]["run_id"]
    assert close(field_risks(shown), field_risks(response))
    assert argument_risks(shown) == {}
