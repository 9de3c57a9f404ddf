"""Tools, structured output, agents, and the risk of fields; answers are scripted where the model is too weak."""

from __future__ import annotations

import json

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.core.tools.calling import call_tool
from pydantic import BaseModel

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.llama_index import CocoaLLM, CocoaRiskEvent, argument_risks, collect_risk, field_risks, get_risk
from cocoa_integrations.llama_index.structured import _with_properties
from tests.helpers.alike import close, to_dicts, without_run
from tests.helpers.llama_index_helpers import Listener, Script
from tests.helpers.tiny_models import Order, check_fields, engine_for_schemas


@pytest.fixture(scope="module")
def engine(block_engine: CocoaEngine) -> CocoaEngine:
    """The real model."""
    return block_engine


def lookup(city: str) -> str:
    """The country a city lies in."""
    return f"{city} lies in France."


LOOKUP = FunctionTool.from_defaults(lookup)
QUESTION = "Which country does Lyon lie in?"


@pytest.mark.also_remote
async def test_a_required_call(caller: CocoaLLM) -> None:
    response = caller.chat_with_tools([LOOKUP], user_msg=QUESTION, tool_required=True)
    [call] = caller.get_tool_calls_from_response(response)
    assert call.tool_name == "lookup"
    assert call.tool_kwargs.keys() == {"city"}
    assert not response.message.content
    [risk] = response.additional_kwargs["cocoa_risk"]["tool_calls"]
    assert risk == response.raw["cocoa_risk"]["tool_calls"][0]  # type: ignore[index]
    text = "".join(span["text"] for span in response.additional_kwargs["cocoa_spans"])
    measured = risk["arguments"]["city"]
    assert text[measured["start"] : measured["end"]] == call.tool_kwargs["city"]
    assert risk["id"] == call.tool_id

    chunks = [*caller.stream_chat_with_tools([LOOKUP], user_msg=QUESTION, tool_required=True)]
    stream = await caller.astream_chat_with_tools([LOOKUP], user_msg=QUESTION, tool_required=True)
    for last in (chunks[-1], [chunk async for chunk in stream][-1]):
        [streamed] = caller.get_tool_calls_from_response(last)
        assert streamed.tool_kwargs == call.tool_kwargs
        assert close(last.additional_kwargs["cocoa_risk"]["tool_calls"], [{**risk, "id": streamed.tool_id}])
    seen = {
        block.tool_call_id for chunk in chunks for block in chunk.message.blocks if isinstance(block, ToolCallBlock)
    }
    assert len(seen) == 1
    assert {chunk.delta for chunk in chunks} == {""}  # an agent shows the deltas: a call is not for the reader


class Tree(BaseModel):
    name: str
    parts: list[Tree] = []


def test_a_tool_with_a_recursive_schema_keeps_what_it_was_made_with() -> None:
    tool = FunctionTool.from_defaults(
        lambda **given: given, name="f", fn_schema=Tree, callback=lambda made: f"{made}!", partial_params={"of": "a"}
    )
    output = call_tool(_with_properties(tool), {"name": "b"})
    assert output.raw_output == {"of": "a", "name": "b"}
    assert output.content == "{'of': 'a', 'name': 'b'}!"


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_a_tool_and_answers(
    engine: CocoaEngine, prompts: list[str], streaming: bool
) -> None:
    llm = CocoaLLM(engine=engine, max_new_tokens=40)
    agent = FunctionAgent(tools=[lookup], llm=llm, initial_tool_choice="lookup", streaming=streaming)
    with collect_risk() as reports:
        output = await agent.run(QUESTION)
    [result] = output.tool_calls
    assert result.tool_name == "lookup"
    assert result.tool_output.content == f"{result.tool_kwargs['city']} lies in France."
    assert output.response.content
    assert len(reports) == 2
    assert f"<tool_response>\n{result.tool_output.content}\n</tool_response>" in prompts[1]
    assert f'<tool_call>\n{{"name": "lookup", "arguments": {json.dumps(result.tool_kwargs)}}}' in prompts[1]


async def test_react_agent_calls_a_tool_and_answers(engine: CocoaEngine) -> None:
    def play(prompt: str) -> str:
        if "Observation: Lyon lies in France." in prompt:
            return "Thought: I can answer.\nAnswer: In France."
        return 'Thought: I need to look.\nAction: lookup\nAction Input: {"city": "Lyon"}'

    script = Script(engine, play)
    llm = CocoaLLM(engine=engine, max_new_tokens=40, generate_kwargs={"logits_processor": script})
    agent = ReActAgent(tools=[lookup], llm=llm)
    with collect_risk() as reports:
        handler = agent.run("Where is Lyon?")
        live = [event.raw async for event in handler.stream_events() if isinstance(event, AgentStream)]
        output = await handler
    assert str(output) == "In France."
    assert len(reports) == 2
    assert output.raw["cocoa_risk"]["compact"] is True  # agents keep it
    [last] = without_run(reports[1:])
    assert [
        {**theirs, **ours} for ours, theirs in zip(get_risk(output).to_dict()["spans"], last["spans"], strict=True)
    ] == last["spans"]
    spans = [raw["cocoa_spans"][0] for raw in live if "cocoa_spans" in raw]
    assert spans == to_dicts(reports[0].spans + reports[1].spans)


def test_only_what_goes_through_the_template_calls_functions(engine: CocoaEngine) -> None:
    assert CocoaLLM(engine=engine).metadata.is_function_calling_model
    assert not CocoaLLM(engine=engine, is_function_calling_model=False).metadata.is_function_calling_model
    assert not CocoaLLM(engine=engine, completion_to_prompt=lambda text: text).metadata.is_function_calling_model
    own = CocoaLLM(engine=engine, messages_to_prompt=lambda messages: str(messages[-1].content), max_new_tokens=2)
    assert not own.metadata.is_function_calling_model
    with pytest.raises(ConfigError, match="leave out messages_to_prompt"):
        own.chat([ChatMessage(QUESTION)], tools=[LOOKUP.metadata.to_openai_tool()])


ORDERED = [ChatMessage(content="An order of tea and milk.")]
QUICK = CocoaLLM(engine=engine_for_schemas(), max_new_tokens=250)


@pytest.mark.slow
async def test_every_field_of_a_structured_llm_has_its_risk(heard: Listener) -> None:
    structured = QUICK.as_structured_llm(Order)
    response = structured.chat(ORDERED)
    report = get_risk(response).to_dict()
    text = "".join(span["text"] for span in report["spans"])
    check_fields(field_risks(response), response.raw, get_risk(response), text)
    assert report["compact"] is True
    [arguments] = argument_risks(response).values()
    assert list(arguments)[:3] == ["person", "items", "paid"]
    with collect_risk() as reports:
        assert QUICK.structured_predict(Order, PromptTemplate("An order of tea and milk.")) == response.raw
    assert close(field_risks(reports[-1]), field_risks(response))
    assert heard.of(CocoaRiskEvent)[0].report.tool_calls[0].arguments.keys() == arguments.keys()
    others = [
        await structured.achat(ORDERED),
        structured.complete("An order of tea and milk."),
        list(structured.stream_chat(ORDERED))[-1],
        [chunk async for chunk in await structured.astream_chat(ORDERED)][-1],
    ]
    for other in others:
        assert close(field_risks(other), field_risks(response))
        assert other.raw == response.raw
    with pytest.raises(ConfigError):
        field_risks(QUICK.as_structured_llm(Order).chat(ORDERED, risk_metadata="none"))


def test_each_entry_point_has_its_detail(heard: Listener) -> None:
    full = QUICK.chat(ORDERED, max_new_tokens=12, risk_metadata="full")
    compact = QUICK.chat(ORDERED, max_new_tokens=12)
    assert set(full.additional_kwargs) == {"cocoa_spans", "cocoa_risk"}
    assert full.raw["cocoa_risk"] == full.additional_kwargs["cocoa_risk"]
    assert full.logprobs
    assert compact.logprobs is None
    assert set(compact.additional_kwargs) == {"cocoa_risk"}
    visible = [span for span in compact.additional_kwargs["cocoa_risk"]["spans"] if "text" in span]
    assert all(not span["text"].strip() for span in visible)
    theirs = full.additional_kwargs["cocoa_risk"]["spans"]
    for ours in (
        get_risk(compact).to_dict()["spans"],
        compact.raw["cocoa_risk"]["spans"],
    ):  # agents keep raw without the text
        assert [{**one, **other} for one, other in zip(theirs, ours, strict=True)] == theirs
        assert "".join(span["text"] for span in ours) == compact.message.content
    assert len(json.dumps(compact.raw)) < len(json.dumps(full.raw))
    chunks = list(QUICK.stream_chat(ORDERED, max_new_tokens=12))
    assert [chunk.additional_kwargs["cocoa_spans"][0] for chunk in chunks[:-1]] == theirs
    assert chunks[-1].additional_kwargs == {"cocoa_risk": full.additional_kwargs["cocoa_risk"]}
    assert chunks[-1].raw["cocoa_risk"] == compact.raw["cocoa_risk"]
    assert [event.report.to_dict()["spans"] for event in heard.of(CocoaRiskEvent)] == [theirs] * 3


def test_a_call_and_a_model_choose_the_detail() -> None:
    silent = CocoaLLM(engine=QUICK.engine, max_new_tokens=12, risk_metadata="none", logprobs=True)
    for response in (silent.complete("Once"), *silent.stream_complete("Once")):
        assert response.additional_kwargs == {}
        assert "cocoa_risk" not in response.raw
        assert response.logprobs is not None
    with pytest.raises(ConfigError, match="risk_metadata='none'"):
        get_risk(silent.complete("Once")).to_dict()
    *before, last = silent.stream_complete("Once", risk_metadata="compact")
    assert all(chunk.additional_kwargs == {} for chunk in before)
    assert (
        get_risk(last).to_dict()["spans"][0]["text"] == get_risk(QUICK.complete("Once")).to_dict()["spans"][0]["text"]
    )
    for wrong in (lambda: QUICK.complete("Once", risk_metadata="some"), lambda: CocoaLLM(risk_metadata="some")):
        with pytest.raises(ConfigError, match="risk_metadata"):
            wrong()
