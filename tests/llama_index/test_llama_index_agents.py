"""Structured output and agents: the call paths, with a scripted answer where the small model is too weak."""

from __future__ import annotations

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index_helpers import Script
from pydantic import BaseModel

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.llama_index import CocoaLLM, collect_risk


class City(BaseModel):
    """A city."""

    name: str
    country: str


def lookup(city: str) -> str:
    """The country a city lies in."""
    return f"{city} lies in France."


def test_structured_predict(llm: CocoaLLM, engine: CocoaEngine) -> None:
    script = Script(engine, lambda prompt: '{"name": "Lyon", "country": "France"}')
    options = {"logits_processor": script, "max_new_tokens": 40}
    with collect_risk() as reports:
        city = llm.structured_predict(City, PromptTemplate("Describe {city}."), llm_kwargs=options, city="Lyon")
    assert city == City(name="Lyon", country="France")
    assert len(reports) == 1


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
    assert output.raw["cocoa_risk"] == reports[1]
    spans = [raw["cocoa_spans"][0] for raw in live if "cocoa_spans" in raw]
    assert spans == reports[0]["spans"] + reports[1]["spans"]


async def test_tools_are_never_dropped_silently(llm: CocoaLLM) -> None:
    with pytest.raises(ConfigError, match="ReActAgent"):
        llm.chat([ChatMessage("Where is Lyon?")], tools=[{"type": "function"}])
    with pytest.raises(ValueError, match="FunctionCallingLLM"):
        await FunctionAgent(tools=[lookup], llm=llm).run("Where is Lyon?")
