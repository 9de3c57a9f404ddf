"""Agents that act on the risk of their model's answers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError, MissingExtraError
from cocoa_integrations import langchain as cocoa_langchain
from cocoa_integrations.langchain import ChatCocoa, HallucinationRiskError, get_risk, get_risk_callback, max_risk
from tests.helpers.made_up_answers import generation
from tests.helpers.reports import risk_report, without_offsets

agents = pytest.importorskip("langchain.agents")

from langchain.agents.structured_output import ToolStrategy  # noqa: E402

from cocoa_integrations.langchain.agents import RiskMiddleware  # noqa: E402  # it needs the package

pytestmark = pytest.mark.also_remote

SAFER = {"max_tokens": 3}
"""Settings with which the quick model's answer is less risky: an answer that is broken off earlier."""


@pytest.fixture(scope="module")
def safer_answer(quick_chat: ChatCocoa, quick_answer: AIMessage, question: str) -> AIMessage:
    answer = quick_chat.invoke(question, **SAFER)
    assert max_risk(answer) < max_risk(quick_answer)
    return answer


@pytest.fixture(scope="module")
def between(quick_answer: AIMessage, safer_answer: AIMessage) -> float:
    """A threshold that only the answer without ``SAFER`` reaches."""
    return (max_risk(quick_answer) + max_risk(safer_answer)) / 2


def agent_of(model: Any, *middleware: Any, **options: Any) -> Any:
    return agents.create_agent(model, tools=[], middleware=middleware, **options)


def asked(question: str) -> dict[str, Any]:
    return {"messages": [("user", question)]}


@pytest.mark.parametrize("threshold", [0.0, 1.0])
async def test_the_state_tells_of_every_call(
    quick_chat: ChatCocoa, quick_answer: AIMessage, question: str, threshold: float
) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(threshold))
    expected = {
        "report": get_risk(quick_answer).to_dict(),
        "value": max_risk(quick_answer),
        "action": "keep" if threshold == 0.0 else "none",
        "attempts": [max_risk(quick_answer)],
    }
    state = agent.invoke(asked(question))
    assert state["cocoa_risks"] == [expected]
    assert state["messages"][-1].text == quick_answer.text
    assert (await agent.ainvoke(asked(question)))["cocoa_risks"] == [expected]
    again = agent.invoke({**state, "messages": [*state["messages"], ("user", "Who?")]})
    assert again["cocoa_risks"][0] == expected
    assert len(again["cocoa_risks"]) == 2


async def test_settings_and_models_are_tried_in_turn(
    quick_chat: ChatCocoa,
    quick_engine: CocoaEngine,
    quick_answer: AIMessage,
    safer_answer: AIMessage,
    question: str,
    between: float,
    spy: Any,
) -> None:
    middleware = RiskMiddleware(between, retry_with=[{"max_tokens": 12}, SAFER, {"alpha": 0.0}], on_risk="raise")
    agent = agent_of(quick_chat, middleware)
    risky, safer = max_risk(quick_answer), max_risk(safer_answer)
    with get_risk_callback() as reported:
        states = [agent.invoke(asked(question)), await agent.ainvoke(asked(question))]
    assert [report.max_risk for report in reported.reports] == 2 * [risky, risky, safer]
    for state in states:
        assert state["messages"][-1].text == safer_answer.text
        [entry] = state["cocoa_risks"]
        assert entry["attempts"] == [risky, risky, safer]  # not the last one: the third passed
        assert (entry["value"], entry["action"], entry["report"]) == (safer, "none", get_risk(safer_answer).to_dict())
    other = ChatCocoa(engine=quick_engine, risk_metadata="full", **SAFER)
    state = agent_of(quick_chat, RiskMiddleware(between, retry_with=other)).invoke(asked(question))
    assert state["messages"][-1].text == safer_answer.text
    assert other.tags is quick_chat.tags is None  # the models given are not changed
    before = len(spy.calls)
    agent_of(quick_chat, RiskMiddleware(1.0, retry_with=SAFER)).invoke(asked(question))
    assert len(spy.calls) == before + 1  # a safe answer is not tried again


class Reported(FakeListChatModel):
    """Answers with the given reports."""

    reports: list[dict[str, Any]]

    def _generate(self, *args: Any, **options: Any) -> Any:
        number = self.i
        result = super()._generate(*args, **options)
        result.generations[0].message.response_metadata = {"cocoa_risk": self.reports[number]}
        return result


def reported(text: str, span_risk: float, **more: Any) -> dict[str, Any]:
    answer = generation((text, span_risk))
    report = risk_report(answer)
    flagged = not span_risk < 0.6  # also if it is not a number
    return {**report, "spans": [{**one, "flagged": flagged} for one in report["spans"]], "threshold": 0.6, **more}


def test_risks_of_different_sources_are_not_compared_with_each_other_under_a_number() -> None:
    def model(text: str, risk: float, source: str) -> Reported:
        return Reported(responses=[text], reports=[reported(text, risk, risk_source=source)])

    first = model("first", 0.8, "calibrator")
    other, lower = model("other", 0.4, "source_attention"), model("lower", 0.7, "calibrator")
    for retries, expected in (([other], "first"), ([other, lower], "lower"), ([lower, other], "lower")):
        state = agent_of(first, RiskMiddleware(0.3, retry_with=retries)).invoke(asked("?"))
        assert state["messages"][-1].text == expected
    unmeasured = model("unmeasured", float("nan"), "token_probability")
    state = agent_of(unmeasured, RiskMiddleware(0.3, retry_with=[other])).invoke(asked("?"))
    assert state["messages"][-1].text == "other"
    passes = model("passes", 0.2, "source_attention")  # the number is for the answers of all models
    state = agent_of(first, RiskMiddleware(0.3, retry_with=[passes])).invoke(asked("?"))
    assert state["messages"][-1].text == "passes"


def test_a_model_that_measures_no_risk_may_be_the_way_out_but_not_the_agents(
    quick_chat: ChatCocoa, question: str, between: float
) -> None:
    other = FakeListChatModel(responses=["Bell, they say."])
    state = agent_of(quick_chat, RiskMiddleware(between, retry_with=[other], on_risk="raise")).invoke(asked(question))
    assert state["messages"][-1].text == "Bell, they say."
    [entry] = state["cocoa_risks"]
    assert (entry["report"], entry["value"], entry["action"]) == (None, None, "none")
    assert entry["attempts"][1:] == [None]
    with pytest.raises(ConfigError, match="no risk report"):
        agent_of(other, RiskMiddleware(between)).invoke(asked(question))


@pytest.mark.parametrize("on_risk", ["keep", "mark", "abstain"])
def test_of_risky_answers_the_least_risky_is_acted_on(
    quick_chat: ChatCocoa, quick_answer: AIMessage, safer_answer: AIMessage, question: str, on_risk: Any
) -> None:
    middleware = RiskMiddleware(0.0, retry_with=[SAFER, {"max_tokens": 12}], on_risk=on_risk, mark="<{text}>")
    state = agent_of(quick_chat, middleware).invoke(asked(question))
    message, [entry] = state["messages"][-1], state["cocoa_risks"]
    assert entry["attempts"] == [max_risk(one) for one in (quick_answer, safer_answer, quick_answer)]
    assert (entry["action"], entry["report"]) == (on_risk, get_risk(safer_answer).to_dict())
    marked = "".join(f"<{span['text']}>" for span in get_risk(safer_answer).to_dict()["spans"])
    assert message.text == {"keep": safer_answer.text, "mark": marked, "abstain": "I don't know."}[on_risk]
    assert without_offsets(get_risk(message).to_dict()) == without_offsets(get_risk(safer_answer).to_dict())


async def test_it_raises_if_asked_to(quick_chat: ChatCocoa, quick_answer: AIMessage, question: str) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(0.0, on_risk="raise"))
    with pytest.raises(HallucinationRiskError) as caught:
        agent.invoke(asked(question))
    assert caught.value.report == get_risk(quick_answer)
    with pytest.raises(HallucinationRiskError):
        await agent.ainvoke(asked(question))


class Caller(GenericFakeChatModel):
    """Says what it is told to, tool calls too."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@pytest.mark.parametrize("tools", [[], [len]])
@pytest.mark.parametrize("on_risk", ["mark", "abstain"])
def test_with_a_response_format_the_agent_ends_too(
    quick_answer: AIMessage, question: str, on_risk: Any, tools: Any
) -> None:
    schema = {"title": "Inventor", "type": "object", "properties": {"name": {"type": "string"}}}
    call = {"name": "Inventor", "args": {"name": "Bell"}, "id": "1", "type": "tool_call"}
    model = Caller(messages=iter([quick_answer.model_copy(update={"tool_calls": [call]})]))  # to be asked once
    middleware = RiskMiddleware(0.0, on_risk=on_risk)
    agent = agents.create_agent(model, tools=tools, middleware=[middleware], response_format=ToolStrategy(schema))
    state = agent.invoke(asked(question))
    if on_risk == "mark":  # left as it is: its text is for programs
        assert state["structured_response"] == {"name": "Bell"}
    else:
        assert state["messages"][-1].text == "I don't know."
        assert len(state["messages"]) == 2
        assert state["structured_response"] is None
    [entry] = state["cocoa_risks"]
    assert entry["action"] == on_risk


def streamed_texts(agent: Any, question: str) -> list[str]:
    return [chunk.text for chunk, _ in agent.stream(asked(question), stream_mode="messages")]


async def test_nothing_is_streamed_before_it_was_judged(
    quick_chat: ChatCocoa, quick_answer: AIMessage, safer_answer: AIMessage, question: str, between: float
) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(between, retry_with=SAFER))
    assert streamed_texts(agent, question) == [safer_answer.text]
    chunks = [chunk async for chunk, _ in agent.astream(asked(question), stream_mode="messages")]
    assert [chunk.text for chunk in chunks] == [safer_answer.text]
    agent = agent_of(quick_chat, RiskMiddleware(between, on_risk="abstain"))
    assert streamed_texts(agent, question) == ["I don't know."]
    [update] = agent.stream(asked(question), stream_mode="updates")
    assert update["model"]["messages"][-1].text == "I don't know."
    spans = [span["text"] for span in get_risk(quick_answer).to_dict()["spans"]]
    assert streamed_texts(agent_of(quick_chat, RiskMiddleware(between)), question) == [*spans, ""]


def test_two_of_them_agree_on_the_state(quick_chat: ChatCocoa, question: str) -> None:
    agent = agent_of(quick_chat, RiskMiddleware(1.0, metric="con_mlds"), RiskMiddleware(0.0, on_risk="abstain"))
    state = agent.invoke(asked(question))
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
