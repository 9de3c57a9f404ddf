"""Tools and structured output, and the risk of every field and nested argument."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables.utils import add as added
from langchain_core.tools import tool
from pydantic import BaseModel

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.langchain import ChatCocoa, ToolRiskMiddleware, argument_risks, field_risks, get_risk, get_spans
from cocoa_integrations.langchain.structured import WholeJsonParser
from tests.helpers.alike import close, to_dicts
from tests.helpers.tiny_models import PATHS, Order, check_fields, engine_for_schemas

CHAT = ChatCocoa(engine=engine_for_schemas(), max_tokens=250)
QUESTION = "What is the weather in San Francisco for 3 days?"


@tool
def get_weather(city: str, days: int) -> str:
    """Get the weather in a city."""
    return f"Sunny in {city} for {days} days."


@tool
def get_time() -> str:
    """Get the time."""
    return "Noon."


@pytest.fixture(scope="module")
def caller(engine: CocoaEngine) -> ChatCocoa:
    return ChatCocoa(engine=engine, max_tokens=60, risk_metadata="full")


@pytest.fixture(scope="module")
def forced(caller: ChatCocoa) -> Any:
    return caller.bind_tools([get_weather, get_time], tool_choice="get_weather")


@pytest.fixture(scope="module")
def message(forced: Any) -> AIMessage:
    return forced.invoke(QUESTION)


def test_a_forced_call_and_the_risk_of_its_arguments(caller: ChatCocoa, message: AIMessage) -> None:
    [call] = message.tool_calls
    assert (call["name"], call["args"].keys()) == ("get_weather", {"city", "days"})
    assert isinstance(call["args"]["days"], int)
    assert get_weather.invoke(call).tool_call_id == call["id"]
    assert (message.content, message.invalid_tool_calls) == ("", [])
    asked, tools = [HumanMessage(QUESTION)], [get_weather, get_time]
    assert message.usage_metadata is not None
    assert caller.get_num_tokens_from_messages(asked, tools=tools) == message.usage_metadata["input_tokens"]
    assert message.usage_metadata["input_tokens"] > caller.get_num_tokens_from_messages(asked)
    spans = to_dicts(get_spans(message))
    text = "".join(span["text"] for span in spans)
    assert text.startswith('<tool_call>\n{"name": "get_weather", "arguments": {')
    figures = argument_risks(message)[call["id"]]
    assert figures.keys() == call["args"].keys()
    for name, measured in figures.items():
        assert text[measured.start : measured.end] == str(call["args"][name])
        within = [span for span in spans if span["start"] < measured.end and span["end"] > measured.start]
        assert measured.spans == [span["span"] for span in within]
        assert measured.risk == max(span["risk"] for span in within)
        assert measured.f_mlds == pytest.approx(sum(span["f_mlds"] for span in within) / len(within))
        assert measured.log_prob < 0
    [report] = get_risk(message).to_dict()["tool_calls"]
    assert report["error"] is None
    assert report["risk"] >= max(measured.risk for measured in figures.values())
    logprobs = message.response_metadata["logprobs"]["content"]
    assert sum(measured.log_prob for measured in figures.values()) >= sum(each["logprob"] for each in logprobs)


def test_the_initial_choice_holds_until_a_tool_has_answered(engine: CocoaEngine) -> None:
    chat = ChatCocoa(engine=engine, max_tokens=30, initial_tool_choice="any")
    model = chat.bind_tools([get_time])
    asked = HumanMessage("What time is it?")
    call = model.invoke([asked])
    assert [each["name"] for each in call.tool_calls] == ["get_time"]
    assert len(added(list(model.stream([asked]))).tool_calls) == 1
    answered = [asked, call, get_time.invoke(call.tool_calls[0])]
    undecided = ChatCocoa(engine=engine, max_tokens=30).bind_tools([get_time])
    assert model.invoke(answered).content == undecided.invoke(answered).content
    assert len(model.invoke([*answered, asked]).tool_calls) == 1
    for choice in ("auto", "none"):
        assert chat.bind_tools([get_time], tool_choice=choice).invoke([asked]).tool_calls == []
    assert chat.invoke([asked]).tool_calls == []
    with pytest.raises(ConfigError, match="did you mean 'get_time'"):
        ChatCocoa(engine=engine, initial_tool_choice="get_tim").bind_tools([get_time])


def test_caches_tell_tools_and_the_initial_choice_apart(engine: CocoaEngine) -> None:
    chat = ChatCocoa(engine=engine, max_tokens=40, cache=InMemoryCache())
    for name in ("get_time", "get_weather", "get_time"):
        model = chat.bind_tools([get_weather, get_time], tool_choice=name)
        assert model.invoke("What time is it?").tool_calls[0]["name"] == name
    for choice, calls in ((None, 0), ("any", 1), (None, 0)):
        chat = ChatCocoa(engine=engine, max_tokens=30, initial_tool_choice=choice, cache=chat.cache)
        assert len(chat.bind_tools([get_time]).invoke("What time is it?").tool_calls) == calls


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Lyon"]
    capital: bool


SCHEMA = {"title": "City", **City.model_json_schema()}
ABOUT = "Describe the city of Paris."


async def test_structured_output_streams() -> None:
    branching = CHAT.model_copy(update={"gamma": 0.02, "max_candidates": 2})
    cities = list(branching.with_structured_output(SCHEMA).stream(ABOUT))
    assert len(cities) > 1
    assert cities[-1].keys() == {"name", "capital"}
    model = CHAT.with_structured_output(City, method="function_calling")
    assert [city async for city in model.astream(ABOUT)][-1] == await model.ainvoke(ABOUT)


@pytest.mark.parametrize("text", ['{"a": %s}' % ("9" * 5000), "[" * 100_000])
def test_json_that_python_cannot_read_is_an_error_of_the_parser(text: str) -> None:
    with pytest.raises(OutputParserException, match="not complete JSON"):
        WholeJsonParser().parse(text)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [City, SCHEMA])
def test_half_an_object_is_an_error(method: Any, schema: Any) -> None:
    hasty = CHAT.model_copy(update={"max_new_tokens": 8 if method == "json_schema" else 24})
    model = hasty.with_structured_output(schema, method=method)
    for ask in (model.invoke, lambda text: list(model.stream(text))):
        with pytest.raises(OutputParserException, match="cut off, raise max_tokens"):
            ask(ABOUT)
    cut = hasty.with_structured_output(schema, method=method, include_raw=True).invoke(ABOUT)
    assert isinstance(cut["parsing_error"], OutputParserException)
    assert cut["parsed"] is None
    assert get_risk(cut["raw"]).spans


def test_what_cannot_be_done_is_told_at_once(quick_chat: ChatCocoa) -> None:
    for name, value, message in (
        ("tool_choice", "get_wether", "did you mean 'get_weather'"),
        ("functions", [{}], r"\(give tools and tool_choice\)"),
        ("tool_chioce", "any", "did you mean 'tool_choice'"),
    ):
        with pytest.raises(ConfigError, match=message):
            quick_chat.bind_tools([get_weather], **{name: value})
    for schema, options, message in (
        (City, {"method": "json_node"}, "did you mean 'json_mode'"),
        (City, {"stric": True}, "unknown option 'stric'"),
        ({"title": 3, "type": "object"}, {"method": "function_calling"}, "tools: number 0 is not"),
    ):
        with pytest.raises(ConfigError, match=message):
            quick_chat.with_structured_output(schema, **options)
    for title in ("", None):
        quick_chat.with_structured_output({"title": title, "type": "object"}, method="function_calling")


REQUEST = "An order of tea and milk."


@pytest.mark.slow
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_every_field_of_structured_output_has_its_risk(method: Any) -> None:
    model = CHAT.with_structured_output(Order, method=method, include_raw=True)
    answer = model.invoke(REQUEST)
    assert isinstance(answer["parsed"], Order)
    assert answer["parsing_error"] is None
    raw, report = answer["raw"], get_risk(answer["raw"]).to_dict()
    text = "".join(span["text"] for span in report["spans"])
    check_fields(field_risks(raw), answer["parsed"], get_risk(raw), text)
    streamed = added([chunk["raw"] for chunk in model.stream(REQUEST) if "raw" in chunk])
    assert close(field_risks(streamed), field_risks(raw))
    assert ("fields" in report) == (method != "function_calling")
    assert report["compact"] is True  # a compact message has it too
    if method == "function_calling":
        [arguments] = argument_risks(raw).values()
        assert list(arguments)[:3] == ["person", "items", "paid"]
        assert set(arguments) - {"person", "items", "paid"} == set(PATHS) - {"$.person", "$.items", "$.paid"}
    else:
        assert argument_risks(raw) == {}


def test_answers_without_structure_have_no_fields() -> None:
    plain = CHAT.invoke("Hi", max_tokens=4)
    assert field_risks(plain) == {}
    assert "fields" not in get_risk(plain).to_dict()
    with pytest.raises(ConfigError):
        field_risks(AIMessage("Hi"))


def test_the_middleware_checks_a_nested_value_if_it_is_named() -> None:
    message = CHAT.with_structured_output(Order, method="function_calling", include_raw=True).invoke(REQUEST)["raw"]

    request: Any = SimpleNamespace(state={"messages": [message]}, tool_call=message.tool_calls[0])

    def result(**options: Any) -> str:
        ran = ToolMessage("ran", tool_call_id=request.tool_call["id"])
        return str(ToolRiskMiddleware(0.0, **options).wrap_tool_call(request, lambda _: ran).content)  # type: ignore[union-attr]

    assert "$.person" not in result()
    assert all(f"{name}=" in result() for name in ("person", "items", "paid"))
    assert "$.person.age (" in result(arguments=["$.person.age"])
    assert result(arguments=["$.person.size"]) == "ran"


@dataclass
class Spot:
    city: str


@pytest.mark.parametrize("tools", [get_weather, {"type": "function"}, "tools", Spot, len, 5, Ellipsis])
def test_tools_without_a_list_are_told(chat: ChatCocoa, tools: Any) -> None:
    with pytest.raises(ConfigError, match="tools takes a list of tools, not "):
        chat.bind_tools(tools)


def test_tools_that_an_iterator_gives_once_are_bound(caller: ChatCocoa) -> None:
    tools = [get_weather, get_time]
    assert caller.bind_tools(iter(tools), tool_choice="any") == caller.bind_tools(tools, tool_choice="any")
