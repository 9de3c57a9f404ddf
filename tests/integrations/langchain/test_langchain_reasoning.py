"""Reasoning models: what they think is a block of its own, and neither called nor counted as the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.messages import AIMessage, HumanMessage, message_to_dict, messages_from_dict
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables.utils import add as added
from pydantic import BaseModel

from cocoa_engine import ConfigError, HallucinationRiskError, PromptError
from cocoa_integrations.langchain import (
    ChatCocoa,
    CocoaLLM,
    field_risks,
    get_risk,
    get_risk_callback,
    get_spans,
    max_risk,
    risk_gate,
)
from tests.helpers.alike import close, token_counts
from tests.helpers.reasoning_models import HYBRID, PLAIN, READS_REASONING, reasoning_engine, saying
from tests.helpers.reports import to_dicts

THOUGHT = 'I could <tool_call>{"name":"get_weather","arguments":{}}</tool_call> but…'
TEXT = f"{THOUGHT}</think>\n\nHello!"


def get_weather() -> str:
    """Get the weather."""
    return "Sunny."


@pytest.fixture(scope="module")
def thinker() -> ChatCocoa:
    engine = reasoning_engine()
    return ChatCocoa(engine=engine, **saying(engine, TEXT))


def without_index(content: Any) -> Any:
    return [{key: value for key, value in block.items() if key != "index"} for block in content]


@pytest.mark.parametrize("version", [None, "v1"])
def test_nothing_is_called_before_the_end_of_the_reasoning(version: str | None) -> None:
    engine = reasoning_engine()
    chat = ChatCocoa(engine=engine, output_version=version, **saying(engine, TEXT))
    model = chat.bind_tools([get_weather], risk_metadata="full")
    message = model.invoke("Hi")
    blocks = [{"type": "reasoning", "reasoning": THOUGHT}, {"type": "text", "text": "Hello!"}]
    assert message.content == blocks
    assert message.content_blocks == blocks
    assert message.text == "Hello!"
    assert message.tool_calls == message.invalid_tool_calls == []
    chunks = list(model.stream("Hi"))
    assert all(chunk.tool_call_chunks == [] for chunk in chunks)
    assert len([chunk for chunk in chunks if chunk.text]) > 1
    whole = added(chunks)
    assert without_index(whole.content) == blocks
    assert whole.text == "Hello!"
    assert close(to_dicts(get_spans(whole)), to_dicts(get_spans(message)))
    assert close(get_risk(whole).to_dict(), get_risk(message).to_dict())


async def test_streams_of_events_and_async(thinker: ChatCocoa) -> None:
    whole = added([chunk async for chunk in thinker.astream("Hi")])
    assert without_index(whole.content) == thinker.invoke("Hi").content
    events = [event async for event in thinker.astream_events("Hi", version="v2")]
    assert events[-1]["data"]["output"].text == "Hello!"
    assert "".join(thinker.pipe(StrOutputParser()).stream("Hi")) == "Hello!"
    assert messages_from_dict([message_to_dict(whole)])[0].content == whole.content


def test_the_risk_is_that_of_the_answer(thinker: ChatCocoa) -> None:
    with get_risk_callback() as seen:
        message = thinker.invoke("Hi")
    report = get_risk(message).to_dict()
    parts = {part: [span for span in report["spans"] if span["part"] == part] for part in ("reasoning", "answer")}
    highest = {part: max(span["risk"] for span in spans) for part, spans in parts.items()}
    assert report["max_risk"] == highest["answer"] == seen.max_risk
    assert report["reasoning"]["max_risk"] == highest["reasoning"]
    assert report["reasoning"]["spans"] == [span["span"] for span in parts["reasoning"]]
    assert max_risk(message, "f_mlds") < max(span["f_mlds"] for span in parts["reasoning"])
    assert "".join(span["text"] for span in parts["answer"]).strip() == "Hello!"
    assert message.usage_metadata is not None
    details = message.usage_metadata["output_token_details"]
    assert 0 < details["reasoning"] < message.usage_metadata["output_tokens"]


def test_gates_count_and_mark_the_answer(thinker: ChatCocoa) -> None:
    message = thinker.invoke("Hi")
    highest = max_risk(message, "f_mlds")
    between = (highest + max(span["f_mlds"] for span in get_risk(message).to_dict()["spans"])) / 2
    assert highest < between
    assert risk_gate(between, metric="f_mlds").invoke(message) == message
    with pytest.raises(HallucinationRiskError):
        risk_gate(highest, metric="f_mlds").invoke(message)
    reasoning = {"type": "reasoning", "reasoning": THOUGHT}
    mark = risk_gate(0.0, on_risk="mark", mark="[{text}]")
    marked = mark.invoke(message)
    assert marked.content[0] == reasoning
    assert marked.text.replace("[", "").replace("]", "") == "Hello!"
    assert marked.text.startswith("[")
    chunks = list((thinker | mark).stream("Hi"))
    assert len(chunks) > 3
    assert added(chunks).text == marked.text
    abstained = risk_gate(0.0, on_risk="abstain").invoke(message)
    assert abstained.content == [reasoning, {"type": "text", "text": "I don't know."}]


def test_reasoning_of_the_history_does_not_reach_the_prompt(thinker: ChatCocoa) -> None:
    blocks: list[Any] = [
        {"type": "reasoning", "reasoning": "Secret."},
        {"type": "thinking", "thinking": "Secret.", "signature": "x"},
        {"type": "redacted_thinking", "data": "Secret."},
        {"type": "non_standard", "value": {"a": "Secret."}},
        {"type": "text", "text": "Hello!"},
    ]
    history: LanguageModelInput = [HumanMessage("Hi"), AIMessage(blocks), HumanMessage("Again")]
    plain: LanguageModelInput = [HumanMessage("Hi"), AIMessage("Hello!"), HumanMessage("Again")]
    assert token_counts(thinker.invoke(history).usage_metadata) == token_counts(thinker.invoke(plain).usage_metadata)
    assert thinker.get_num_tokens_from_messages(list(history)) == thinker.get_num_tokens_from_messages(list(plain))  # type: ignore[arg-type]
    answer = thinker.invoke("Hi")
    assert thinker.invoke([HumanMessage("Hi"), answer, HumanMessage("Again")]).text == "Hello!"
    with pytest.raises(PromptError, match="content of type 'reasoning' in HumanMessage"):
        thinker.invoke([HumanMessage(blocks[:1]), HumanMessage("Hi")])


def test_thinking_is_switched_off_by_the_constructor_or_a_call() -> None:
    engine = reasoning_engine(HYBRID)
    chat = ChatCocoa(engine=engine, max_tokens=4)
    tokens = chat.invoke("Hi").usage_metadata["input_tokens"]  # type: ignore[index]
    more = len(engine.encode("<think>\n\n</think>\n\n", add_special_tokens=False))
    off: dict[str, Any]
    for off in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        made = ChatCocoa(engine=engine, max_tokens=4, **off)
        for message in (chat.invoke("Hi", **off), made.invoke("Hi"), chat.bind(**off).invoke("Hi")):
            assert message.usage_metadata["input_tokens"] == tokens + more  # type: ignore[index]
        assert made.invoke("Hi", enable_thinking=True).usage_metadata["input_tokens"] == tokens  # type: ignore[index]
        assert made._identifying_params != chat._identifying_params
        assert made.get_num_tokens_from_messages([HumanMessage("Hi")]) == tokens + more


def test_options_of_the_template_that_make_no_sense_are_refused(thinker: ChatCocoa) -> None:
    with pytest.raises(ConfigError, match="has no variable enable_thinking"):
        thinker.invoke("Hi", enable_thinking=False)
    with pytest.raises(ConfigError, match="not tools"):
        thinker.invoke("Hi", chat_template_kwargs={"tools": []})
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        ChatCocoa(chat_template_kwargs=3)
    with pytest.raises(ConfigError, match="unknown option 'enable_thinking'"):
        CocoaLLM(enable_thinking=False)
    with pytest.raises(ConfigError, match="unknown option 'enable_thinking'"):
        CocoaLLM(engine=thinker.engine).invoke("Hi", enable_thinking=False)


def test_the_final_message_is_continued() -> None:
    engine = reasoning_engine(PLAIN)
    begun: LanguageModelInput = [HumanMessage("Hi"), AIMessage("Hello, ")]
    chat = ChatCocoa(engine=engine, max_tokens=8)
    made = ChatCocoa(engine=engine, max_tokens=8, continue_final_message=True)
    expected = engine.generate("<|user|>\nHi<|end|>\n<|assistant|>\nHello, ", max_new_tokens=8)
    for message in (
        chat.invoke(begun, continue_final_message=True),
        made.invoke(begun),
        added(list(made.stream(begun))),
        chat.bind(continue_final_message=True).invoke(begun),
    ):
        assert message.text == expected.text
        assert message.usage_metadata["input_tokens"] == expected.usage.prompt_tokens  # type: ignore[index]
    today = engine.render_chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, "}])
    assert chat.invoke(begun).text == engine.generate(today, max_new_tokens=8).text
    for wrong in (made, chat.bind(continue_final_message=True)):
        with pytest.raises(PromptError, match="the last message has the role 'user'"):
            wrong.invoke("Hi")
    assert made.get_num_tokens_from_messages([HumanMessage("Hi")]) == chat.get_num_tokens_from_messages(
        [HumanMessage("Hi")]
    )
    thinks = made.invoke([HumanMessage("Hi"), AIMessage("<think>Well")], **saying(engine, ", ok.</think>Hello!"))
    assert thinks.content == [{"type": "reasoning", "reasoning": ", ok."}, {"type": "text", "text": "Hello!"}]


class Move(BaseModel):
    """Move."""

    up: bool


@pytest.mark.slow
@pytest.mark.parametrize("tags", ["text", "added", "special"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_schema_holds_after_the_reasoning(tags: str, method: Any) -> None:
    engine = reasoning_engine(tags=tags)
    options = saying(engine, "Up {or} down?</think>\n", ends=False)
    chat = ChatCocoa(engine=engine, **{**options, "max_new_tokens": 200})
    model = chat.with_structured_output(Move, method=method, include_raw=True)
    answer = model.invoke("Hi")
    assert isinstance(answer["parsed"], Move), answer
    assert answer["raw"].content[0] == {"type": "reasoning", "reasoning": "Up {or} down?"}
    if method == "json_schema":
        assert json.loads(answer["raw"].text).keys() == {"up"}
    [(path, field)] = field_risks(answer["raw"]).items()
    text = "".join(span["text"] for span in get_risk(answer["raw"]).to_dict()["spans"])
    assert (path, json.loads(text[field.start : field.end])) == ("$.up", answer["parsed"].up)


@pytest.mark.parametrize("limit", [12, 40])
def test_an_answer_cut_off_inside_has_no_text(thinker: ChatCocoa, limit: int) -> None:
    message, whole = thinker.invoke("Hi", max_tokens=limit), added(list(thinker.stream("Hi", max_tokens=limit)))
    for each in (message, whole):
        [block] = without_index(each.content)
        assert THOUGHT.startswith(block["reasoning"])
        assert each.text == ""
        assert get_risk(each).max_risk == 0.0
        assert get_risk(each).to_dict()["reasoning"]["max_risk"] > 0.0
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_token_details"] == {"reasoning": limit}


def test_what_the_model_opens_itself_is_reasoning_too() -> None:
    engine = reasoning_engine(HYBRID)
    chat = ChatCocoa(engine=engine, **saying(engine, "<think>\nWell.</think>\n\nHello!"))
    blocks = [{"type": "reasoning", "reasoning": "Well."}, {"type": "text", "text": "Hello!"}]
    assert without_index(added(list(chat.stream("Hi"))).content) == chat.invoke("Hi").content == blocks
    empty = saying(engine, "<think>\n\n</think>\n\nHello!")
    assert added(list(chat.stream("Hi", **empty))).content == chat.invoke("Hi", **empty).content == "Hello!"


def test_a_template_may_read_the_reasoning_of_the_history() -> None:
    engine = reasoning_engine(READS_REASONING)
    chat = ChatCocoa(engine=engine)
    for said in (
        AIMessage([{"type": "reasoning", "reasoning": "Well."}, {"type": "text", "text": "Hello!"}]),
        AIMessage([{"type": "thinking", "thinking": "Well."}, {"type": "text", "text": "Hello!"}]),
        AIMessage("Hello!", additional_kwargs={"reasoning_content": "Well."}),
    ):
        prompt = chat.prompt_text([HumanMessage("Hi"), said, HumanMessage("Again")])
        assert "<think>Well.</think>Hello!" in prompt
