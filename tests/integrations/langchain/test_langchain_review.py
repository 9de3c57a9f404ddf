"""Agents: risk in their messages and streams, tools that run or are refused, and answers that a person decides on."""

from __future__ import annotations

import json
import pickle
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage
from pydantic import BaseModel

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_engine.model.embedded import MODEL_NAME
from cocoa_integrations.langchain import ChatCocoa, argument_risks, get_risk, get_risk_callback, get_spans, max_risk

agents = pytest.importorskip("langchain.agents")

from langchain.agents.middleware import HumanInTheLoopMiddleware  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402
from langgraph.types import Command  # noqa: E402

from cocoa_integrations.langchain import RiskMiddleware, RiskyToolCalls, ToolRiskMiddleware  # noqa: E402
from tests.helpers.reports import made_report, to_dicts, without_offsets, without_run  # noqa: E402
from tests.helpers.structured import engine_for_schemas  # noqa: E402

THREAD: Any = {"configurable": {"thread_id": "1"}}
TEXT = "Alexander Graham Bell."


def agent_of(model: Any, *middleware: Any, **options: Any) -> Any:
    options.setdefault("checkpointer", InMemorySaver())
    return agents.create_agent(model, tools=options.pop("tools", []), middleware=middleware, **options)


@pytest.fixture
def asked(question: str) -> dict[str, Any]:
    return {"messages": [("user", question)]}


@pytest.fixture
def reviewer() -> RiskMiddleware:
    """Stops at every answer."""
    return RiskMiddleware(0.0, on_risk="interrupt")


DECISIONS = [
    ({"type": "accept"}, None),
    ({"type": "edit", "text": TEXT}, TEXT),
    ({"type": "abstain"}, "I don't know."),
]


def _shown(request: dict[str, Any], answer: AIMessage) -> None:
    assert request["type"] == "risky_answer"
    assert request["answer"] == answer.text
    assert request["report"] == get_risk(answer).to_dict()
    assert request["spans"] == [span for span in get_risk(answer).to_dict()["spans"] if span["text"].strip()]
    assert (request["metric"], request["threshold"], request["value"]) == ("risk", 0.0, max_risk(answer))
    assert request["decisions"] == ["accept", "edit", "abstain"]
    assert json.loads(json.dumps(request)) == request  # plain values


def _decided(state: dict[str, Any], decision: dict[str, Any], text: str) -> None:
    answer = state["messages"][-1]
    assert answer.text == text
    assert len(state["messages"]) == 2
    [entry] = state["cocoa_risks"]
    assert entry["action"] == decision["type"]
    assert without_offsets(entry["report"]) == without_offsets(get_risk(answer).to_dict())
    if decision["type"] != "accept":
        assert get_risk(answer).to_dict()["gate"]["action"] == decision["type"]


@pytest.mark.parametrize(("decision", "text"), DECISIONS)
async def test_a_risky_answer_waits_for_a_decision(
    quick_chat: ChatCocoa, quick_answer: AIMessage, asked: Any, reviewer: Any, spy: Any, decision: Any, text: Any
) -> None:
    expected, resumed = quick_answer.text if text is None else text, Command(resume=decision)
    for asynchronous in (False, True):
        agent = agent_of(quick_chat, reviewer)
        state = await agent.ainvoke(asked, THREAD) if asynchronous else agent.invoke(asked, THREAD)
        [interrupt] = state["__interrupt__"]
        _shown(interrupt.value, quick_answer)
        assert len(state["messages"]) == 1  # the answer is not part of the conversation yet
        calls = len(spy.calls)
        state = await agent.ainvoke(resumed, THREAD) if asynchronous else agent.invoke(resumed, THREAD)
        _decided(state, decision, expected)
        assert len(spy.calls) == calls  # the model was not called again
    agent = agent_of(quick_chat, reviewer)
    assert list(agent.stream(asked, THREAD, stream_mode="messages")) == []
    chunks = [chunk for chunk, _ in agent.stream(resumed, THREAD, stream_mode="messages")]
    assert [chunk.text for chunk in chunks] == [expected]
    agent = agent_of(quick_chat, reviewer)
    updates = [update async for update in agent.astream(asked, THREAD, stream_mode="updates")]
    [interrupt] = updates[-1]["__interrupt__"]
    _shown(interrupt.value, quick_answer)
    assert not any("model" in update for update in updates)
    updates = [update async for update in agent.astream(resumed, THREAD, stream_mode="updates")]
    [update] = [update["model"] for update in updates if "model" in update]
    assert update["messages"][-1].text == expected


def test_a_run_goes_on_after_a_restart(
    quick_chat: ChatCocoa, quick_answer: AIMessage, asked: Any, reviewer: Any, spy: Any
) -> None:
    before = InMemorySaver()
    agent_of(quick_chat, reviewer, checkpointer=before).invoke(asked, THREAD)
    after = InMemorySaver()  # what a database would hold
    stored = pickle.dumps([{key: dict(value) for key, value in before.storage.items()}, before.writes, before.blobs])
    storage, writes, blobs = pickle.loads(stored)
    for key, value in storage.items():
        after.storage[key].update(value)
    after.writes.update(writes)
    after.blobs.update(blobs)
    agent = agent_of(quick_chat, RiskMiddleware(0.0, on_risk="interrupt"), checkpointer=after)
    [interrupt] = agent.get_state(THREAD).interrupts
    _shown(interrupt.value, quick_answer)
    calls = len(spy.calls)
    state = agent.invoke(Command(resume={"type": "accept"}), THREAD)
    _decided(state, {"type": "accept"}, quick_answer.text)
    assert len(spy.calls) == calls


@pytest.mark.parametrize("wrong", ["accept", {"type": "approve"}, {"type": "edit"}, {"type": "edit", "text": 3}, None])
def test_after_another_value_it_asks_again(quick_chat: ChatCocoa, asked: Any, reviewer: Any, wrong: Any) -> None:
    agent = agent_of(quick_chat, reviewer)
    agent.invoke(asked, THREAD)
    if wrong is None:
        wrong = {"type": None}
    [interrupt] = agent.invoke(Command(resume=wrong), THREAD)["__interrupt__"]
    assert '"edit"' in interrupt.value["error"]
    assert interrupt.value["answer"]
    state = agent.invoke(Command(resume={"type": "edit", "text": TEXT}), THREAD)
    assert state["messages"][-1].text == TEXT


def test_a_safe_answer_does_not_wait(quick_chat: ChatCocoa, quick_answer: AIMessage, asked: Any) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(1.0, on_risk="interrupt"))
    state = agent.invoke(asked, THREAD)
    assert "__interrupt__" not in state
    assert state["messages"][-1].text == quick_answer.text
    assert state["cocoa_risks"][0]["action"] == "none"


# Tool calls. These need a model that writes one.


class Answer(BaseModel):
    """An answer."""

    number: Literal[7, 42]


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    return engine_for_schemas()


def double(number: Literal[7, 42]) -> int:
    """Double a number."""
    return 2 * number


DOUBLE = {"messages": [("user", "Double 4.")]}


def test_a_structured_answer_is_accepted_or_refused(engine: CocoaEngine) -> None:
    chat = ChatCocoa(engine=engine, max_tokens=80)
    agent = agent_of(chat, RiskMiddleware(0.0, on_risk="interrupt"), response_format=Answer)
    [interrupt] = agent.invoke(DOUBLE, THREAD)["__interrupt__"]
    assert interrupt.value["decisions"] == ["accept", "abstain"]
    [interrupt] = agent.invoke(Command(resume={"type": "edit", "text": "8"}), THREAD)["__interrupt__"]
    assert "error" in interrupt.value
    accepted = agent.invoke(Command(resume={"type": "accept"}), THREAD)
    assert isinstance(accepted["structured_response"], Answer)


def reviewed(engine: CocoaEngine, risky: RiskyToolCalls) -> Any:
    chat = ChatCocoa(engine=engine, max_tokens=80, initial_tool_choice="any")
    review: Any = {"allowed_decisions": ["approve", "edit"], "when": risky, "description": risky.description}
    return agent_of(chat, HumanInTheLoopMiddleware(interrupt_on={"double": review}), tools=[double])


async def test_an_agent_stops_at_a_risky_argument_and_goes_on_after_an_edit(engine: CocoaEngine) -> None:
    agent = reviewed(engine, RiskyToolCalls(0.0))
    state = await agent.ainvoke(DOUBLE, THREAD)
    [interrupt] = state["__interrupt__"]
    call = state["messages"][-1]
    measured = argument_risks(call)[call.tool_calls[0]["id"]]["number"].risk
    number = call.tool_calls[0]["args"]["number"]
    described = interrupt.value["action_requests"][0]["description"]
    assert described == f"the risk of these arguments reaches 0: number={number} ({measured:.2f})"
    decision = {"type": "edit", "edited_action": {"name": "double", "args": {"number": 42}}}
    state = await agent.ainvoke(Command(resume={"decisions": [decision]}), THREAD)
    assert state["messages"][2].content.endswith("84")
    for risky in (RiskyToolCalls(1.0), RiskyToolCalls(0.0, arguments=["other"]), RiskyToolCalls(100, metric="f_mlds")):
        assert reviewed(engine, risky).invoke(DOUBLE, THREAD)["messages"][2].status == "success"


@pytest.mark.parametrize(
    ("given", "model", "source", "chosen", "expected"),
    [
        (None, MODEL_NAME, "calibrator", 0.61, 0.2),
        (None, MODEL_NAME, "calibrator", 0.1, 0.1),
        (None, "another", "calibrator", 0.61, 0.61),
        (None, MODEL_NAME, "token_probability", 0.9, 0.9),
        (0.5, MODEL_NAME, "calibrator", 0.61, 0.5),
    ],
)
def test_the_default_threshold_of_arguments(
    given: float | None, model: str, source: str, chosen: float, expected: float
) -> None:
    report = made_report([0.1], risk_source=source, threshold=chosen, model_name=model)
    assert RiskyToolCalls(given).threshold_for(report) == expected


@pytest.mark.parametrize("kind", [RiskyToolCalls, ToolRiskMiddleware])
@pytest.mark.parametrize(
    "options", [{"threshold": "low"}, {"threshold": 1, "arguments": "a"}, {"threshold": 1, "metric": "x"}]
)
def test_invalid_conditions_are_refused(kind: Any, options: Any) -> None:
    with pytest.raises(ConfigError):
        kind(**options)


def test_risk_reaches_messages_updates_and_callbacks(quick_chat: ChatCocoa, quick_answer: Any, asked: Any) -> None:
    agent = agents.create_agent(quick_chat, tools=[])
    with get_risk_callback() as risk:
        message = agent.invoke(asked)["messages"][-1]
        chunks = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages")]
        [update] = agent.stream(asked, stream_mode="updates")
    expected = get_risk(quick_answer).to_dict()
    assert (
        get_risk(message).to_dict()
        == get_risk(chunks[-1]).to_dict()
        == get_risk(update["model"]["messages"][-1]).to_dict()
        == expected
    )
    assert [span for chunk in chunks for span in to_dicts(get_spans(chunk))] == expected["spans"]
    assert without_run(risk.reports) == [expected] * 3


def calling(engine: CocoaEngine, *middleware: Any) -> Any:
    chat = ChatCocoa(engine=engine, max_tokens=80, initial_tool_choice="any", risk_metadata="full")
    return agents.create_agent(chat, tools=[double], middleware=middleware)


def test_an_agent_calls_a_tool_and_answers(engine: CocoaEngine) -> None:
    with get_risk_callback() as risk:
        _, call, result, answer = calling(engine).invoke(DOUBLE)["messages"]
    number = call.tool_calls[0]["args"]["number"]
    assert result.content == str(2 * number)
    assert answer.text
    assert not answer.tool_calls
    assert [get_risk(call).to_dict(), get_risk(answer).to_dict()] == without_run(risk.reports)


async def test_a_risky_call_is_not_run(engine: CocoaEngine) -> None:
    _, call, result, _ = calling(engine).invoke(DOUBLE)["messages"]
    measured = argument_risks(call)[call.tool_calls[0]["id"]]["number"].risk
    low = 0.9 * measured
    refused = calling(engine, ToolRiskMiddleware(low))
    for messages in (refused.invoke(DOUBLE)["messages"], (await refused.ainvoke(DOUBLE))["messages"]):
        assert messages[2].status == "error"
        assert "double was not run" in messages[2].content
        assert f"number={call.tool_calls[0]['args']['number']} ({measured:.2f})" in messages[2].content
    several = calling(engine, ToolRiskMiddleware(0, tools=["other"]), ToolRiskMiddleware(low, tools=["double"]))
    assert several.invoke(DOUBLE)["messages"][2].status == "error"
    figures = argument_risks(call)[call.tool_calls[0]["id"]]["number"]
    for metric, value in (("f_mlds", figures.f_mlds), ("self_information", -figures.log_prob)):
        both = calling(engine, *(ToolRiskMiddleware(part * value, metric=metric) for part in (1.1, 0.9)))
        (refusal,) = both.invoke(DOUBLE)["messages"][2:3]
        assert refusal.status == "error"
        assert f"{metric.replace('_', ' ')} of these arguments" in refusal.content
        assert f"({value:.2f})" in refusal.content
    for lenient in (
        ToolRiskMiddleware(1.1 * measured),
        ToolRiskMiddleware(0, tools=["other"]),
        ToolRiskMiddleware(0, arguments=["other"]),
    ):
        assert calling(engine, lenient).invoke(DOUBLE)["messages"][2].content == result.content
