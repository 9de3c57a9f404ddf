"""Agents: risk in messages and streams, tools that run or are refused, answers that are retried or reviewed."""

import json
import pickle
import sys
from itertools import repeat
from typing import Any, Literal

import pytest
from langchain import agents
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models import FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import BaseModel

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, MissingExtraError
from cocoa_engine.model.load_options import MODEL_NAME
from cocoa_integrations import langchain as cocoa_langchain
from cocoa_integrations.langchain import (
    ChatCocoa,
    HallucinationRiskError,
    RiskyToolCalls,
    ToolRiskMiddleware,
    argument_risks,
    get_risk,
    get_risk_callback,
    max_risk,
)
from cocoa_integrations.langchain.agents import RiskMiddleware
from tests.helpers.alike import made_report, without_offsets, without_run
from tests.helpers.tiny_models import QUESTION, engine_for_schemas

pytestmark = pytest.mark.also_remote
here = pytest.mark.also_remote(False)

ASKED = {"messages": [("user", QUESTION)]}
SAFER = {"max_tokens": 3}
"""Settings with which the quick model's answer is less risky: an answer that is broken off earlier."""


@pytest.fixture(scope="module")
def safer_answer(quick_chat: ChatCocoa, quick_answer: AIMessage) -> AIMessage:
    answer = quick_chat.invoke(QUESTION, **SAFER)
    assert max_risk(answer) < max_risk(quick_answer)
    return answer


@pytest.fixture(scope="module")
def between(quick_answer: AIMessage, safer_answer: AIMessage) -> float:
    """A threshold that only the answer without ``SAFER`` reaches."""
    return (max_risk(quick_answer) + max_risk(safer_answer)) / 2


def agent_of(model: Any, *middleware: Any, **options: Any) -> Any:
    return agents.create_agent(model, middleware=middleware, **{"tools": [], **options})


@pytest.mark.parametrize("threshold", [0.0, 1.0])
async def test_the_state_tells_of_every_call(quick_chat: ChatCocoa, quick_answer: AIMessage, threshold: float) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(threshold))
    expected = {
        "report": get_risk(quick_answer).to_dict(),
        "value": max_risk(quick_answer),
        "action": "keep" if threshold == 0.0 else "none",
        "attempts": [max_risk(quick_answer)],
    }
    state = agent.invoke(ASKED)
    assert state["cocoa_risks"] == [expected]
    assert state["messages"][-1].text == quick_answer.text
    assert (await agent.ainvoke(ASKED))["cocoa_risks"] == [expected]
    again = agent.invoke({**state, "messages": [*state["messages"], ("user", "Who?")]})
    assert again["cocoa_risks"][0] == expected
    assert len(again["cocoa_risks"]) == 2


async def test_settings_and_models_are_tried_in_turn(
    quick_chat: ChatCocoa,
    quick_engine: CocoaEngine,
    quick_answer: AIMessage,
    safer_answer: AIMessage,
    between: float,
    spy: Any,
) -> None:
    middleware = RiskMiddleware(between, retry_with=[{"max_tokens": 12}, SAFER, {"alpha": 0.0}], on_risk="raise")
    agent = agent_of(quick_chat, middleware)
    risky, safer = max_risk(quick_answer), max_risk(safer_answer)
    with get_risk_callback() as reported:
        states = [agent.invoke(ASKED), await agent.ainvoke(ASKED)]
    assert [report.max_risk for report in reported.reports] == 2 * [risky, risky, safer]
    for state in states:
        assert state["messages"][-1].text == safer_answer.text
        [entry] = state["cocoa_risks"]
        assert entry["attempts"] == [risky, risky, safer]  # not the last one: the third passed
        assert (entry["value"], entry["action"], entry["report"]) == (safer, "none", get_risk(safer_answer).to_dict())
    other = ChatCocoa(engine=quick_engine, risk_metadata="full", **SAFER)
    state = agent_of(quick_chat, RiskMiddleware(between, retry_with=other)).invoke(ASKED)
    assert state["messages"][-1].text == safer_answer.text
    assert other.tags is quick_chat.tags is None  # the models given are not changed
    before = len(spy.method_calls)
    agent_of(quick_chat, RiskMiddleware(1.0, retry_with=SAFER)).invoke(ASKED)
    assert len(spy.method_calls) == before + 1  # a safe answer is not tried again


def test_risks_of_different_sources_are_not_compared_with_each_other_under_a_number() -> None:
    def model(text: str, risk: float, source: str) -> GenericFakeChatModel:
        report = made_report([risk], risk_source=source).to_dict()
        return GenericFakeChatModel(messages=repeat(AIMessage(text, response_metadata={"cocoa_risk": report})))

    first = model("first", 0.8, "calibrator")
    other, lower = model("other", 0.4, "source_attention"), model("lower", 0.7, "calibrator")
    for retries, expected in (([other], "first"), ([other, lower], "lower"), ([lower, other], "lower")):
        state = agent_of(first, RiskMiddleware(0.3, retry_with=retries)).invoke(ASKED)
        assert state["messages"][-1].text == expected
    unmeasured = model("unmeasured", float("nan"), "token_probability")
    state = agent_of(unmeasured, RiskMiddleware(0.3, retry_with=[other])).invoke(ASKED)
    assert state["messages"][-1].text == "other"
    passes = model("passes", 0.2, "source_attention")  # the number is for the answers of all models
    state = agent_of(first, RiskMiddleware(0.3, retry_with=[passes])).invoke(ASKED)
    assert state["messages"][-1].text == "passes"


def test_a_model_that_measures_no_risk_may_be_the_way_out_but_not_the_agents(
    quick_chat: ChatCocoa, between: float
) -> None:
    other = FakeListChatModel(responses=["Bell, they say."])
    state = agent_of(quick_chat, RiskMiddleware(between, retry_with=[other], on_risk="raise")).invoke(ASKED)
    assert state["messages"][-1].text == "Bell, they say."
    [entry] = state["cocoa_risks"]
    assert (entry["report"], entry["value"], entry["action"]) == (None, None, "none")
    assert entry["attempts"][1:] == [None]
    with pytest.raises(ConfigError, match="no risk report"):
        agent_of(other, RiskMiddleware(between)).invoke(ASKED)


@pytest.mark.parametrize("on_risk", ["keep", "mark", "abstain"])
def test_of_risky_answers_the_least_risky_is_acted_on(
    quick_chat: ChatCocoa, quick_answer: AIMessage, safer_answer: AIMessage, on_risk: Any
) -> None:
    middleware = RiskMiddleware(0.0, retry_with=[SAFER, {"max_tokens": 12}], on_risk=on_risk, mark="<{text}>")
    state = agent_of(quick_chat, middleware).invoke(ASKED)
    message, [entry] = state["messages"][-1], state["cocoa_risks"]
    assert entry["attempts"] == [max_risk(one) for one in (quick_answer, safer_answer, quick_answer)]
    assert (entry["action"], entry["report"]) == (on_risk, get_risk(safer_answer).to_dict())
    marked = "".join(f"<{span['text']}>" for span in get_risk(safer_answer).to_dict()["spans"])
    assert message.text == {"keep": safer_answer.text, "mark": marked, "abstain": "I don't know."}[on_risk]
    assert without_offsets(get_risk(message).to_dict()) == without_offsets(get_risk(safer_answer).to_dict())


async def test_it_raises_if_asked_to(quick_chat: ChatCocoa, quick_answer: AIMessage) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(0.0, on_risk="raise"))
    with pytest.raises(HallucinationRiskError) as caught:
        agent.invoke(ASKED)
    assert caught.value.report == get_risk(quick_answer)
    with pytest.raises(HallucinationRiskError):
        await agent.ainvoke(ASKED)


class Caller(GenericFakeChatModel):
    """Says what it is told to, tool calls too."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@pytest.mark.parametrize("tools", [[], [len]])
@pytest.mark.parametrize("on_risk", ["mark", "abstain"])
def test_with_a_response_format_the_agent_ends_too(quick_answer: AIMessage, on_risk: Any, tools: Any) -> None:
    schema = {"title": "Inventor", "type": "object", "properties": {"name": {"type": "string"}}}
    call = {"name": "Inventor", "args": {"name": "Bell"}, "id": "1", "type": "tool_call"}
    model = Caller(messages=iter([quick_answer.model_copy(update={"tool_calls": [call]})]))  # to be asked once
    middleware = RiskMiddleware(0.0, on_risk=on_risk)
    agent = agents.create_agent(model, tools=tools, middleware=[middleware], response_format=ToolStrategy(schema))
    state = agent.invoke(ASKED)
    if on_risk == "mark":  # left as it is: its text is for programs
        assert state["structured_response"] == {"name": "Bell"}
    else:
        assert state["messages"][-1].text == "I don't know."
        assert len(state["messages"]) == 2
        assert state["structured_response"] is None
    [entry] = state["cocoa_risks"]
    assert entry["action"] == on_risk


def streamed_texts(agent: Any, asked: Any) -> list[str]:
    return [chunk.text for chunk, _ in agent.stream(asked, stream_mode="messages")]


async def test_nothing_is_streamed_before_it_was_judged(
    quick_chat: ChatCocoa, quick_answer: AIMessage, safer_answer: AIMessage, between: float
) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(between, retry_with=SAFER))
    assert streamed_texts(agent, ASKED) == [safer_answer.text]
    chunks = [chunk async for chunk, _ in agent.astream(ASKED, stream_mode="messages")]
    assert [chunk.text for chunk in chunks] == [safer_answer.text]
    agent = agent_of(quick_chat, RiskMiddleware(between, on_risk="abstain"))
    assert streamed_texts(agent, ASKED) == ["I don't know."]
    [update] = agent.stream(ASKED, stream_mode="updates")
    assert update["model"]["messages"][-1].text == "I don't know."
    spans = [span["text"] for span in get_risk(quick_answer).to_dict()["spans"]]
    assert streamed_texts(agent_of(quick_chat, RiskMiddleware(between)), ASKED) == [*spans, ""]


def test_two_of_them_agree_on_the_state(quick_chat: ChatCocoa) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(1.0, metric="con_mlds"), RiskMiddleware(0.0, on_risk="abstain"))
    state = agent.invoke(ASKED)
    assert state["messages"][-1].text == "I don't know."
    assert [entry["action"] for entry in state["cocoa_risks"]] == ["abstain", "none"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_risk": "keeep"}, "keep"),
        ({"metric": "none"}, "unknown metric 'none'"),
        ({"retry_with": {"gama": 0.1}}, "did you mean 'gamma'"),
        ({"retry_with": "gpt-5"}, "chat models and dicts"),
        ({"mark": "!"}, "no {text} field"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RiskMiddleware(**{"threshold": 0.5, **options})


@pytest.mark.parametrize(("name", "module"), [("RiskMiddleware", "agents"), ("ToolRiskMiddleware", "agents")])
def test_without_the_package_it_says_what_to_install(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cocoa_langchain.RiskMiddleware is RiskMiddleware
    monkeypatch.delitem(sys.modules, f"cocoa_integrations.langchain.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "langchain.agents", None)
    with pytest.raises(MissingExtraError, match=r"agents needs langchain: .*'cocoa-integrations\[agents\]'"):
        getattr(cocoa_langchain, name)


THREAD: Any = {"configurable": {"thread_id": "1"}}
REVIEWER = RiskMiddleware(0.0, on_risk="interrupt")
"""Stops at every answer."""
TEXT = "Alexander Graham Bell."


def reviewed_agent(model: Any, *middleware: Any, **options: Any) -> Any:
    return agent_of(model, *middleware, **{"checkpointer": InMemorySaver(), **options})


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


@here
@pytest.mark.parametrize(("decision", "text"), DECISIONS)
async def test_a_risky_answer_waits_for_a_decision(
    quick_chat: ChatCocoa, quick_answer: AIMessage, spy: Any, decision: Any, text: Any
) -> None:
    expected, resumed = quick_answer.text if text is None else text, Command(resume=decision)
    for asynchronous in (False, True):
        agent = reviewed_agent(quick_chat, REVIEWER)
        state = await agent.ainvoke(ASKED, THREAD) if asynchronous else agent.invoke(ASKED, THREAD)
        [interrupt] = state["__interrupt__"]
        _shown(interrupt.value, quick_answer)
        assert len(state["messages"]) == 1  # the answer is not part of the conversation yet
        calls = len(spy.method_calls)
        state = await agent.ainvoke(resumed, THREAD) if asynchronous else agent.invoke(resumed, THREAD)
        _decided(state, decision, expected)
        assert len(spy.method_calls) == calls  # the model was not called again
    agent = reviewed_agent(quick_chat, REVIEWER)
    assert list(agent.stream(ASKED, THREAD, stream_mode="messages")) == []
    chunks = [chunk for chunk, _ in agent.stream(resumed, THREAD, stream_mode="messages")]
    assert [chunk.text for chunk in chunks] == [expected]
    agent = reviewed_agent(quick_chat, REVIEWER)
    updates = [update async for update in agent.astream(ASKED, THREAD, stream_mode="updates")]
    [interrupt] = updates[-1]["__interrupt__"]
    _shown(interrupt.value, quick_answer)
    assert not any("model" in update for update in updates)
    updates = [update async for update in agent.astream(resumed, THREAD, stream_mode="updates")]
    [update] = [update["model"] for update in updates if "model" in update]
    assert update["messages"][-1].text == expected


@here
def test_a_run_goes_on_after_a_restart(quick_chat: ChatCocoa, quick_answer: AIMessage, spy: Any) -> None:
    before = InMemorySaver()
    reviewed_agent(quick_chat, REVIEWER, checkpointer=before).invoke(ASKED, THREAD)
    after = InMemorySaver()  # what a database would hold
    stored = pickle.dumps([{key: dict(value) for key, value in before.storage.items()}, before.writes, before.blobs])
    storage, writes, blobs = pickle.loads(stored)
    for key, value in storage.items():
        after.storage[key].update(value)
    after.writes.update(writes)
    after.blobs.update(blobs)
    agent = reviewed_agent(quick_chat, RiskMiddleware(0.0, on_risk="interrupt"), checkpointer=after)
    [interrupt] = agent.get_state(THREAD).interrupts
    _shown(interrupt.value, quick_answer)
    calls = len(spy.method_calls)
    state = agent.invoke(Command(resume={"type": "accept"}), THREAD)
    _decided(state, {"type": "accept"}, quick_answer.text)
    assert len(spy.method_calls) == calls


@here
@pytest.mark.parametrize("wrong", ["accept", {"type": "approve"}, {"type": "edit"}, {"type": "edit", "text": 3}, None])
def test_after_another_value_it_asks_again(quick_chat: ChatCocoa, wrong: Any) -> None:
    agent = reviewed_agent(quick_chat, REVIEWER)
    agent.invoke(ASKED, THREAD)
    if wrong is None:
        wrong = {"type": None}
    [interrupt] = agent.invoke(Command(resume=wrong), THREAD)["__interrupt__"]
    assert '"edit"' in interrupt.value["error"]
    assert interrupt.value["answer"]
    state = agent.invoke(Command(resume={"type": "edit", "text": TEXT}), THREAD)
    assert state["messages"][-1].text == TEXT


@here
def test_a_safe_answer_does_not_wait(quick_chat: ChatCocoa, quick_answer: AIMessage) -> None:
    agent = reviewed_agent(quick_chat, RiskMiddleware(1.0, on_risk="interrupt"))
    state = agent.invoke(ASKED, THREAD)
    assert "__interrupt__" not in state
    assert state["messages"][-1].text == quick_answer.text
    assert state["cocoa_risks"][0]["action"] == "none"


# Tool calls. These need a model that writes one.


class Answer(BaseModel):
    """An answer."""

    number: Literal[7, 42]


def double(number: Literal[7, 42]) -> int:
    """Double a number."""
    return 2 * number


DOUBLE = {"messages": [("user", "Double 4.")]}


def test_a_structured_answer_is_accepted_or_refused() -> None:
    chat = ChatCocoa(engine=engine_for_schemas(), max_tokens=80)
    agent = reviewed_agent(chat, RiskMiddleware(0.0, on_risk="interrupt"), response_format=Answer)
    [interrupt] = agent.invoke(DOUBLE, THREAD)["__interrupt__"]
    assert interrupt.value["decisions"] == ["accept", "abstain"]
    [interrupt] = agent.invoke(Command(resume={"type": "edit", "text": "8"}), THREAD)["__interrupt__"]
    assert "error" in interrupt.value
    accepted = agent.invoke(Command(resume={"type": "accept"}), THREAD)
    assert isinstance(accepted["structured_response"], Answer)


def reviewed(risky: RiskyToolCalls) -> Any:
    chat = ChatCocoa(engine=engine_for_schemas(), max_tokens=80, initial_tool_choice="any")
    review: Any = {"allowed_decisions": ["approve", "edit"], "when": risky, "description": risky.description}
    return reviewed_agent(chat, HumanInTheLoopMiddleware(interrupt_on={"double": review}), tools=[double])


@pytest.mark.slow
async def test_an_agent_stops_at_a_risky_argument_and_goes_on_after_an_edit() -> None:
    agent = reviewed(RiskyToolCalls(0.0))
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
        assert reviewed(risky).invoke(DOUBLE, THREAD)["messages"][2].status == "success"


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


def calling(*middleware: Any) -> Any:
    chat = ChatCocoa(engine=engine_for_schemas(), max_tokens=80, initial_tool_choice="any", risk_metadata="full")
    return agents.create_agent(chat, tools=[double], middleware=middleware)


def test_an_agent_calls_a_tool_and_answers() -> None:
    with get_risk_callback() as risk:
        _, call, result, answer = calling().invoke(DOUBLE)["messages"]
    number = call.tool_calls[0]["args"]["number"]
    assert result.content == str(2 * number)
    assert answer.text
    assert not answer.tool_calls
    assert [get_risk(call).to_dict(), get_risk(answer).to_dict()] == without_run(risk.reports)


@pytest.mark.slow
async def test_a_risky_call_is_not_run() -> None:
    _, call, result, _ = calling().invoke(DOUBLE)["messages"]
    measured = argument_risks(call)[call.tool_calls[0]["id"]]["number"].risk
    low = 0.9 * measured
    refused = calling(ToolRiskMiddleware(low))
    for messages in (refused.invoke(DOUBLE)["messages"], (await refused.ainvoke(DOUBLE))["messages"]):
        assert messages[2].status == "error"
        assert "double was not run" in messages[2].content
        assert f"number={call.tool_calls[0]['args']['number']} ({measured:.2f})" in messages[2].content
    several = calling(ToolRiskMiddleware(0, tools=["other"]), ToolRiskMiddleware(low, tools=["double"]))
    assert several.invoke(DOUBLE)["messages"][2].status == "error"
    figures = argument_risks(call)[call.tool_calls[0]["id"]]["number"]
    for metric, value in (("f_mlds", figures.f_mlds), ("self_information", -figures.log_prob)):
        both = calling(*(ToolRiskMiddleware(part * value, metric=metric) for part in (1.1, 0.9)))
        (refusal,) = both.invoke(DOUBLE)["messages"][2:3]
        assert refusal.status == "error"
        assert f"{metric.replace('_', ' ')} of these arguments" in refusal.content
        assert f"({value:.2f})" in refusal.content
    for lenient in (
        ToolRiskMiddleware(1.1 * measured),
        ToolRiskMiddleware(0, tools=["other"]),
        ToolRiskMiddleware(0, arguments=["other"]),
    ):
        assert calling(lenient).invoke(DOUBLE)["messages"][2].content == result.content
