"""The risk of every field of structured output and of nested arguments, by path."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage

from cocoa_engine.errors import ConfigError
from cocoa_integrations.langchain import ChatCocoa, ToolRiskMiddleware, argument_risks, field_risks, get_risk
from tests.helpers.alike import close
from tests.helpers.structured import PATHS, Order, check_fields, engine_for_schemas

REQUEST = "An order of tea and milk."


@pytest.fixture(scope="module")
def chat() -> ChatCocoa:
    return ChatCocoa(engine=engine_for_schemas(), max_tokens=250)


def generated(message: AIMessage) -> str:
    return "".join(span["text"] for span in get_risk(message).to_dict()["spans"])


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_every_field_of_structured_output_has_its_risk(chat: ChatCocoa, method: Any) -> None:
    answer = chat.with_structured_output(Order, method=method, include_raw=True).invoke(REQUEST)
    assert answer["parsing_error"] is None
    raw, report = answer["raw"], get_risk(answer["raw"]).to_dict()
    check_fields(field_risks(raw), answer["parsed"], get_risk(raw), generated(raw))
    assert ("fields" in report) == (method != "function_calling")
    assert report["compact"] is True  # a compact message has it too
    if method == "function_calling":
        [arguments] = argument_risks(raw).values()
        assert list(arguments)[:3] == ["person", "items", "paid"]
        assert set(arguments) - {"person", "items", "paid"} == set(PATHS) - {"$.person", "$.items", "$.paid"}
    else:
        assert argument_risks(raw) == {}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_end_of_a_stream_has_them(chat: ChatCocoa, method: Any) -> None:
    model = chat.with_structured_output(Order, method=method, include_raw=True)
    whole: Any = None
    for chunk in model.stream(REQUEST):
        if "raw" in chunk:
            whole = chunk["raw"] if whole is None else whole + chunk["raw"]
    expected = model.invoke(REQUEST)["raw"]
    assert close(field_risks(whole), field_risks(expected))


def test_answers_without_structure_have_no_fields(chat: ChatCocoa) -> None:
    plain = chat.invoke("Hi", max_tokens=4)
    assert field_risks(plain) == {}
    assert "fields" not in get_risk(plain).to_dict()
    with pytest.raises(ConfigError):
        field_risks(AIMessage("Hi"))


class _Request:
    """What the middleware reads of a tool call."""

    def __init__(self, message: AIMessage) -> None:
        self.state = {"messages": [message]}
        self.tool_call = message.tool_calls[0]


def test_the_middleware_checks_a_nested_value_if_it_is_named(chat: ChatCocoa) -> None:
    message = chat.with_structured_output(Order, method="function_calling", include_raw=True).invoke(REQUEST)["raw"]

    def ran(request: Any) -> ToolMessage:
        return ToolMessage("ran", tool_call_id=request.tool_call["id"])

    def result(**options: Any) -> str:
        return str(ToolRiskMiddleware(0.0, **options).wrap_tool_call(_Request(message), ran).content)  # type: ignore[arg-type]

    assert "$.person" not in result()
    assert all(f"{name}=" in result() for name in ("person", "items", "paid"))
    assert "$.person.age (" in result(arguments=["$.person.age"])
    assert result(arguments=["$.person.size"]) == "ran"
