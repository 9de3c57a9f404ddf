"""Tools, structured output and agents, with a scripted or forced answer where the small model is too weak."""

from __future__ import annotations

import json

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.core.tools.calling import call_tool
from pydantic import BaseModel, Field

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.llama_index import CocoaLLM, collect_risk, get_risk
from cocoa_integrations.llama_index.structured import _with_properties
from tests.helpers.alike import close
from tests.helpers.llama_index_helpers import Script
from tests.helpers.reports import to_dicts, without_run


@pytest.fixture(scope="module")
def engine(block_engine: CocoaEngine) -> CocoaEngine:
    """The real model."""
    return block_engine


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    capital: bool


def lookup(city: str) -> str:
    """The country a city lies in."""
    return f"{city} lies in France."


LOOKUP = FunctionTool.from_defaults(lookup)
QUESTION = "Which country does Lyon lie in?"
ABOUT = PromptTemplate("Describe the city {city}.")


@pytest.mark.also_remote
async def test_structured_predict_is_held_to_the_schema(caller: CocoaLLM) -> None:
    with collect_risk() as reports:
        city = caller.structured_predict(City, ABOUT, city="Lyon")
        assert await caller.astructured_predict(City, ABOUT, city="Lyon") == city
        streamed = list(caller.stream_structured_predict(City, ABOUT, city="Lyon"))
    assert isinstance(city, City)
    assert streamed[-1] == city
    assert len(reports) == 3
    answer = caller.as_structured_llm(City).complete("Describe the city Lyon.")
    assert isinstance(answer.raw, City)


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
