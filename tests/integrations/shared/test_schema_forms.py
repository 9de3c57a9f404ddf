"""Every form of a schema that the frameworks document keeps what is optional and what may be null, or is refused.

The table is tried at every door: tools, structured output and response formats of both adapters and of the server. What
is enforced is asked of llguidance, and what the prompt says of jsonschema.
"""

# ruff: noqa: UP007, UP045 - older forms are tested too

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import json
import math
import typing
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar, Union

import jsonschema
import llguidance
import pydantic
import pydantic.v1
import pytest
import typing_extensions
from langchain_core.messages import AIMessage
from langchain_core.tools import InjectedToolArg, StructuredTool, tool
from llama_index.core.program.function_program import get_function_tool
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, ConfigDict, Field, RootModel
from typing_extensions import NotRequired, Required

from cocoa_engine import ConfigError
from cocoa_engine.decoding.grammar import json_schema_grammar
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.langchain.composed import Composed
from cocoa_integrations.langchain.structured import tool_request
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.llama_index.options import split_tools
from cocoa_integrations.server.protocol.requests import ChatRequest
from cocoa_integrations.tool_calling import Plan, ToolRequest
from cocoa_integrations.tool_calling.formats import HERMES
from cocoa_integrations.tool_calling.schema_forms import reader_of
from tests.helpers.reasoning_models import saying
from tests.helpers.tiny_models import engine_for_schemas

T = TypeVar("T")
BYTES = llguidance.LLTokenizer("byte")


class Size(enum.Enum):
    S = "s"
    L = "l"


class Plain(BaseModel):
    """A person."""

    name: str
    age: int | None
    nick: str | None = None


class PlainOf1(pydantic.v1.BaseModel):
    name: str
    age: int | None = pydantic.v1.Field(...)
    nick: str | None


class PlainDict(typing.TypedDict):
    name: str
    age: int | None
    nick: NotRequired[str | None]


class Base(typing_extensions.TypedDict):
    name: str


class PartialDict(Base, total=False):
    age: Required[int | None]
    nick: str | None


class LangChainDict(typing.TypedDict):
    """A person."""

    name: Annotated[str, ..., "The full name"]
    age: Annotated[int | None, ..., "Age in years"]
    nick: Annotated[str | None, None, "What friends say"]


@dataclasses.dataclass
class PlainData:
    name: str
    age: int | None
    nick: str | None = None


def function(
    name: str,
    age: int | None,
    nick: Annotated[str | None, "What friends say"] = None,
    *,
    run: Annotated[str, InjectedToolArg] = "",
) -> None:
    """Greet a person.

    Args:
        name: the full name.
        age: in years.
    """


class Holder:
    def method(self, name: str, age: int | None, nick: str | None = None) -> None:
        """Greet a person."""


# LlamaIndex does not look up names in annotations
function.__annotations__ = typing.get_type_hints(function, include_extras=True)


NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": NULLABLE, "nick": {"type": ["string", "null"]}},
    "required": ["name", "age"],
}
TITLED = {"title": "Person", "description": "A person.", **PERSON}
PERSONS = [{"name": "A", "age": None}, {"name": "A", "age": 3, "nick": "B"}, {"name": "A", "age": 3, "nick": None}]
NO_PERSONS: list[Any] = [
    {"name": "A"},
    {"age": 3},
    {"name": None, "age": 3},
    {"name": "A", "age": "3"},
    {"name": "A", "age": 1, "extra": 1},
    3,
]


PEOPLE = PERSONS, NO_PERSONS


class Node(BaseModel):
    value: int
    next: Node | None = None


class NodeDict(typing.TypedDict):
    value: int
    next: NotRequired[NodeDict | None]


class NodeOf1(pydantic.v1.BaseModel):
    value: int
    next: NodeOf1 | None


NodeOf1.update_forward_refs()


@dataclasses.dataclass
class NodeData:
    value: int
    next: NodeData | None = None


def of_nodes(value: int, next: Node | None = None) -> None:
    """Has nodes."""


of_nodes.__annotations__ = typing.get_type_hints(of_nodes)


NODE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/Node",
}
NODES = [{"value": 1}, {"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": {"value": 3}}}]
NO_NODES: list[Any] = [
    {},
    {"value": 1, "next": 2},
    {"value": 1, "next": {"value": "x"}},
    {"value": 1, "next": {"value": 2, "next": {}}},
]


class Left(BaseModel):
    kind: Literal["left"]
    x: int | None = None


class Right(BaseModel):
    kind: Literal["right"]
    y: list[str | None] | None = None


class Many(BaseModel):
    model_config = ConfigDict(extra="forbid")

    side: Annotated[Left | Right, Field(discriminator="kind")]
    size: Size | None = None
    pair: tuple[int, str | None]
    by_name: dict[str, int | None] = {}
    few: list[Annotated[int, Field(ge=1, le=3)]] = Field(default=[], max_length=2)
    given: str = Field(default="x", alias="as", pattern="^[a-z]$")
    what: Literal["a", 1, None]


class ManyDict(typing.TypedDict):
    side: Left | Right
    size: NotRequired[Size | None]
    pair: tuple[int, str | None]
    by_name: NotRequired[collections.abc.Mapping[str, int | None]]
    few: NotRequired[list[Annotated[int, Field(ge=1, le=3)]]]
    what: Literal["a", 1, None]


MANY: list[Any] = [
    {"side": {"kind": "left"}, "pair": [1, None], "what": None},
    {
        "side": {"kind": "left", "x": None},
        "size": None,
        "pair": [1, "b"],
        "by_name": {"q": None},
        "few": [1, 3],
        "what": 1,
    },
    {"side": {"kind": "right", "y": [None, "c"]}, "size": "l", "pair": [1, "b"], "what": "a"},
]
NO_MANY: list[Any] = [
    {"side": {"kind": "up"}, "pair": [1, None], "what": None},
    {"side": {"kind": "left", "x": "1"}, "pair": [1, None], "what": None},
    {"side": {"kind": "left"}, "pair": [1], "what": None},
    {"side": {"kind": "left"}, "pair": [None, None], "what": None},
    {"side": {"kind": "left"}, "size": "m", "pair": [1, None], "what": None},
    {"side": {"kind": "left"}, "pair": [1, None], "few": [4], "what": None},
    {"side": {"kind": "left"}, "pair": [1, None], "what": 2},
]


class Box(BaseModel, Generic[T]):
    item: T
    more: list[T] | None = None


BOXES = [{"item": 1}, {"item": 1, "more": None}, {"item": 1, "more": [2]}]
NO_BOXES: list[Any] = [{}, {"item": None}, {"item": 1, "more": ["x"]}]


class Odd(BaseModel):
    """What pydantic's own schemas write in ways that no JSON has."""

    least: float = -math.inf
    other: float = math.nan
    whatever: Any = object()


ODD: list[Any] = [{}, {"least": 1.5, "other": -2}]
NO_ODD: list[Any] = [{"least": "inf"}, {"other": None}]


class Listed(RootModel[list[int | None]]):
    pass


def openai(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "person", "description": "", "parameters": schema}}


def with_properties(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**PERSON, "properties": {**PERSON["properties"], **given}, **more}


def with_age(age: dict[str, Any], **more: Any) -> dict[str, Any]:
    return with_properties({"age": age}, **more)


INTEGER = {"type": "integer"}
SPELLINGS: dict[str, dict[str, Any]] = {
    "anyOf null": PERSON,
    "type list": with_age({"type": ["integer", "null"]}),
    "nullable": with_age({"type": "integer", "nullable": True}),
    "oneOf null": with_age({"oneOf": NULLABLE["anyOf"]}),
    "$ref nullable": with_age({"allOf": [{"$ref": "#/$defs/Age"}], "nullable": True}, **{"$defs": {"Age": INTEGER}}),
    "$defs": with_age({"$ref": "#/$defs/Age"}, **{"$defs": {"Age": NULLABLE}}),
    "definitions": with_age({"$ref": "#/definitions/Age"}, definitions={"Age": {"type": "integer", "nullable": True}}),
    "$ref at the root": {"$ref": "#/$defs/Person", "$defs": {"Person": PERSON}},
    "pointer": with_properties({"nick": {"$ref": "#/properties/other"}, "other": {"type": ["string", "null"]}}),
    "a property named nullable": with_properties(
        {"nullable": {"type": "boolean"}, "properties": {"type": "string"}, "$ref": {"type": "string"}}
    ),
}
WRAPPED: dict[str, dict[str, Any]] = {
    "OpenAI": openai(PERSON),
    "OpenAI's responses": {"type": "function", "name": "person", "parameters": PERSON},
    "a function": {"name": "person", "description": "A person.", "parameters": PERSON},
    "titled": TITLED,
    "titled, a list of one type": {**TITLED, "type": ["object"]},
    "Anthropic": {"name": "person", "description": "A person.", "input_schema": PERSON},
    "Bedrock": {"toolSpec": {"name": "person", "inputSchema": {"json": PERSON}}},
    "titled reference": {"title": "Person", "$ref": "#/$defs/P", "$defs": {"P": PERSON}},
    "strict": {"type": "function", "function": {"name": "person", "strict": True, "parameters": PERSON}},
}

TYPES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "pydantic": (Plain, *PEOPLE),
    "pydantic 1": (PlainOf1, *PEOPLE),
    "TypedDict": (PlainDict, *PEOPLE),
    "total=False": (PartialDict, *PEOPLE),
    "Annotated": (LangChainDict, *PEOPLE),
    "dataclass": (PlainData, *PEOPLE),
    "recursive": (Node, NODES, NO_NODES),
    "recursive TypedDict": (NodeDict, NODES, NO_NODES),
    "recursive pydantic 1": (NodeOf1, NODES, NO_NODES),
    "recursive dataclass": (NodeData, NODES, NO_NODES),
    "many": (Many, MANY, NO_MANY),
    "many in a TypedDict": (ManyDict, MANY, NO_MANY),
    "generic": (Box[int], BOXES, NO_BOXES),
    "odd": (Odd, ODD, NO_ODD),
}
VALUES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "union": (Union[Left, Right], [{"kind": "left"}, {"kind": "right", "y": [None]}], [{"kind": "up"}, None, 1]),
    "optional": (Optional[PlainDict], [*PERSONS, None], NO_PERSONS),
    "X | None": (Plain | None, [*PERSONS, None], NO_PERSONS),
    "list": (list[PlainDict], [[], PERSONS], [PERSONS[0], [NO_PERSONS[0]]]),
    "root": (Listed, [[1, None], []], [["x"], 1]),
    "enum": (Size, ["s", "l"], ["m", None]),
    "literal": (Literal["a", 1, None], ["a", 1, None], ["b", 2]),
    "mapping": (dict[str, int | None], [{}, {"a": None, "b": 1}], [{"a": "x"}, 1]),
    "int": (int, [1, -2], ["x", None]),
}  # not the arguments of a tool
FUNCTIONS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "function": (function, *PEOPLE),
    "method": (Holder().method, *PEOPLE),
    "recursive function": (of_nodes, NODES, NO_NODES),
}
LANGCHAIN_TOOLS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "@tool": (tool(function), *PEOPLE),
    "args_schema": (StructuredTool.from_function(function, name="f", args_schema=Plain), *PEOPLE),
    "args_schema of pydantic 1": (StructuredTool.from_function(function, name="f", args_schema=PlainOf1), *PEOPLE),
    "args_schema in JSON": (StructuredTool(name="f", description="", args_schema=PERSON, func=function), *PEOPLE),
    "recursive args_schema": (StructuredTool.from_function(of_nodes, name="f", args_schema=Node), NODES, NO_NODES),
}
IN_JSON: dict[str, tuple[Any, list[Any], list[Any]]] = {
    **{name: (schema, *PEOPLE) for name, schema in SPELLINGS.items()},
    "recursive": (NODE, NODES, NO_NODES),
    "recursive object": ({**NODE, "type": "object"}, NODES, NO_NODES),
}
RESPONSE_FORMATS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "name": ({"name": "person", "schema": PERSON}, *PEOPLE),
    "type": ({"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}, *PEOPLE),
}


class Unbuilt:
    def __get_pydantic_core_schema__(self, *_: Any) -> Any:
        raise LookupError("an error of a user's type")


NOT_SCHEMAS = [
    3,
    None,
    "Plain",
    '{"type": "object"}',
    [tool(function)],
    Ellipsis,
    object(),
    PlainData("A", 3),
    Unbuilt,
    Callable[[int], int],
    functools.partial(function, "A"),
    type("Bare", (), {}),
]


def accepts(request: ToolRequest, value: Any) -> bool:
    """Whether the grammar of a request lets a model write a value."""
    engine = Constrained()
    text = json.dumps(value)
    if request.schema is None:
        request = dataclasses.replace(request, required=True)
        text = HERMES.write(request.tools[0]["function"]["name"], value)
    [asked] = Plan(request, engine).processors()  # type: ignore[arg-type]
    grammar = json_schema_grammar(asked["json_schema"]) if "json_schema" in asked else asked["grammar"]
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


class Constrained:
    """An engine that tells what its answers would be constrained by."""

    tokenizer, end_token_ids = engine_for_schemas().tokenizer, engine_for_schemas().end_token_ids
    render_chat = staticmethod(engine_for_schemas().render_chat)

    def constrain(self, **asked: Any) -> Any:
        return asked


def shown(request: ToolRequest) -> dict[str, Any]:
    """The schema in the prompt of a request."""
    [system, _], _ = Plan(request, engine_for_schemas()).prompt([{"role": "user", "content": "Hi"}])
    text = system["content"]
    if request.schema is not None:
        return json.loads(text.rpartition("\n")[2])
    [line] = [line for line in text.splitlines() if line.startswith('{"type": "function"')]
    return json.loads(line)["function"]["parameters"]


def check(request: ToolRequest, passing: list[Any], failing: list[Any]) -> None:
    """The values that pass and fail, where they are enforced and where they are told."""
    if request.schema is None:
        passing, failing = ([value for value in values if isinstance(value, dict)] for values in (passing, failing))
    assert [value for value in passing if not accepts(request, value)] == []
    assert [value for value in failing if accepts(request, value)] == []
    if request.described:
        told = jsonschema.Draft202012Validator(shown(request))
        assert [value for value in passing if not told.is_valid(value)] == []
        assert [value for value in failing if told.is_valid(value) and '"extra"' not in json.dumps(value)] == []


def asked_of_langchain(runnable: Any) -> ToolRequest:
    """What a runnable with tools or structured output asks of the model."""
    model = runnable if isinstance(runnable, Composed) else runnable.first
    return tool_request(model.kwargs)


CHAT, LLM = ChatCocoa(engine=engine_for_schemas()), CocoaLLM(engine=engine_for_schemas())


def rows(table: dict[str, tuple[Any, list[Any], list[Any]]]) -> list[Any]:
    return [pytest.param(*row, id=name) for name, row in table.items()]


def as_tool(form: Any) -> list[ToolRequest]:
    return [asked_of_langchain(CHAT.bind_tools([form], tool_choice="any")), tool_request({"tools": [form]})]


def as_structured_output(form: Any, *methods: Any) -> list[ToolRequest]:
    return [asked_of_langchain(CHAT.with_structured_output(form, method=method)) for method in methods]


def as_tool_of_llama_index(tool: FunctionTool) -> list[ToolRequest]:
    prepared = LLM._prepare_chat_with_tools([tool], "Hi", tool_required=True)
    return [split_tools({name: prepared[name] for name in ("tools", "tool_choice")})[0]]


METHODS = ("json_schema", "function_calling")
PYDANTIC = {name: row for name, row in TYPES.items() if isinstance(row[0], type) and issubclass(row[0], BaseModel)}
DOORS: list[tuple[Callable[[Any], list[ToolRequest]], dict[str, tuple[Any, list[Any], list[Any]]]]] = [
    (as_tool, TYPES | FUNCTIONS | LANGCHAIN_TOOLS),
    (
        lambda form: [*as_tool(form)[:1], *as_structured_output(form, *METHODS)],
        {name: (form, *PEOPLE) for name, form in WRAPPED.items()},
    ),
    (lambda form: as_structured_output(form, *METHODS, "json_mode"), TYPES),
    (lambda form: as_structured_output(form, "json_schema"), VALUES | RESPONSE_FORMATS),
    (lambda form: as_tool_of_llama_index(get_function_tool(form)), PYDANTIC),
    (lambda form: as_tool_of_llama_index(FunctionTool.from_defaults(form, partial_params={"run": ""})), FUNCTIONS),
]


@pytest.mark.parametrize(
    ("door", "form", "passing", "failing"),
    [pytest.param(door, *row, id=name) for door, table in DOORS for name, row in table.items()],
)
def test_forms_at_every_door(door: Any, form: Any, passing: list[Any], failing: list[Any]) -> None:
    for request in door(form):
        check(request, passing, failing)


@pytest.mark.slow
@pytest.mark.parametrize(("schema", "passing", "failing"), rows(IN_JSON))
def test_json_schemas_at_every_door(schema: dict[str, Any], passing: list[Any], failing: list[Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    requests = [
        asked_of_langchain(CHAT.with_structured_output(schema)),
        asked_of_langchain(CHAT.with_structured_output({"title": "Person", **schema}, method="function_calling")),
        asked_of_langchain(CHAT.bind_tools([openai(schema)])),
        tool_request({"response_format": form}),
        split_tools({"response_format": form})[0],
        split_tools({"tools": [openai(schema)]})[0],
        ChatRequest(**body, response_format=form).tool_request(),
        ChatRequest(**body, tools=[openai(schema)]).tool_request(),
    ]
    for request in requests:
        check(request, passing, failing)
    # objects inside lists and alternatives
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    inside = {key: value for key, value in schema.items() if key not in definitions}
    nested = {"type": "array", "items": {"anyOf": [inside, {"type": "null"}]}, **definitions}
    if "#/properties" not in json.dumps(schema):
        lists, wrong = [[value, None] for value in passing], [[value] for value in failing]
        check(asked_of_langchain(CHAT.with_structured_output(nested)), lists, wrong)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize(("form", "passing", "failing"), rows(TYPES))
def test_the_value_has_the_type_that_was_asked_for(
    form: Any, passing: list[Any], failing: list[Any], method: Any
) -> None:
    value, model = passing[-1], CHAT.with_structured_output(form, method=method)
    message = AIMessage(json.dumps(value))
    if method == "function_calling":
        name = asked_of_langchain(model).tools[0]["function"]["name"]
        message = AIMessage("", tool_calls=[{"name": name, "args": value, "id": "1"}])
    made = model.last.invoke(message)  # type: ignore[attr-defined]
    assert made == value if typing_extensions.is_typeddict(form) else isinstance(made, typing.get_origin(form) or form)
    assert reader_of(form) is None or made == reader_of(form)(json.dumps(value))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (Size, "l", Size.L),
        (Optional[Plain], None, None),
        (Union[Left, Right], {"kind": "right"}, Right(kind="right")),
        (list[PlainDict], PERSONS, PERSONS),
        (int, 3, 3),
        ({"title": "P", **PERSON}, PERSONS[0], PERSONS[0]),
        (function, PERSONS[0], PERSONS[0]),
    ],
)
def test_other_values_have_it_too(form: Any, value: Any, expected: Any) -> None:
    assert CHAT.with_structured_output(form).last.invoke(AIMessage(json.dumps(value))) == expected  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("form", [Node, Box[int]])
async def test_llama_index_predicts_objects_of_it(form: Any) -> None:
    engine = engine_for_schemas()
    value: Any = NODES[-1] if form is Node else {"item": 1, "more": [2]}
    options = saying(engine, HERMES.write(form.__name__, value))
    llm = CocoaLLM(engine=engine, generate_kwargs={"logits_processor": options.pop("logits_processor")}, **options)
    expected, prompt = form.model_validate(value), PromptTemplate("Hi")
    assert llm.structured_predict(form, prompt) == expected
    assert await llm.astructured_predict(form, prompt) == expected
    assert [*llm.stream_structured_predict(form, prompt)][-1] == expected
    assert llm.as_structured_llm(form).complete("Hi").raw == expected


@pytest.mark.parametrize("form", NOT_SCHEMAS)
def test_what_has_no_schema_is_refused_when_it_is_bound(form: Any) -> None:
    refused = "is not a (tool|schema)|takes a schema"
    if not callable(form) or isinstance(form, functools.partial):
        with pytest.raises(ConfigError, match=refused):
            CHAT.bind_tools([form])
    for method in ("json_schema", "function_calling"):
        with pytest.raises(ConfigError, match=refused):
            CHAT.with_structured_output(form, method=method)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        *((form, "not object") for form in (Size, Listed, {"title": "P", "type": "array"})),
        ({"name": "p", "parameters": {"type": "string"}}, "not object"),
        *(({"type": kind, "name": "search"}, "is not a tool") for kind in ("web_search_20250305", "mcp")),
        *((form, "is not a tool") for form in ({1: 2}, Unbuilt)),
    ],
)
def test_a_tool_takes_an_object(form: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CHAT.bind_tools([form])
    if form is Listed:
        prepared = LLM._prepare_chat_with_tools([get_function_tool(form)], "Hi")
        with pytest.raises(ConfigError, match="not object"):
            split_tools({"tools": prepared["tools"]})
