"""How tools are told to a model: by its chat template where that can, else by our own words.

Schemas: an answer fits, or the caller is told where it looks. No schema that has a value is refused in an answer.
"""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.exceptions import OutputParserException
from llama_index.core.llms import ChatMessage

from cocoa_engine import CocoaEngine, ConfigError, unenforced
from cocoa_engine.errors import IncompleteAnswerError
from cocoa_integrations.langchain import ChatCocoa
from cocoa_integrations.llama_index import CocoaLLM
from cocoa_integrations.server import create_app
from cocoa_integrations.tool_calling import Plan, ToolRequest
from cocoa_integrations.tool_calling.formats import HERMES, template_format
from cocoa_integrations.tool_calling.schemas import closed, enforceable, mismatch
from tests.conformance.json_schema import DRAFTS, outcome, schemas_of, walk
from tests.conformance.tools import source_if_there
from tests.helpers import tool_templates
from tests.helpers.mutations import fuzz
from tests.helpers.served import post
from tests.helpers.tiny_models import engine_for_schemas, tiny_model, tiny_tokenizer
from tests.helpers.tool_templates import MOVE, PARAMETERS

STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "id": "abc123def", "function": {"name": "move", "arguments": {"up": True, "unit": "km"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Move up a km."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "done", "tool_call_id": "abc123def", "name": "move"},
]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


with_tools = pytest.mark.parametrize(
    "template",
    [tool_templates.HERMES, tool_templates.LLAMA, tool_templates.MISTRAL],
    ids=["hermes", "llama", "mistral"],
)


@cache
def tiny_engine(template: str, *, tags_are_tokens: bool = False) -> CocoaEngine:
    """As in Mistral's tokenizers, its tag is a special token; Qwen's tags are tokens, but not special ones."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    if tags_are_tokens:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = template
    return CocoaEngine(tiny_model("llama", seed=3, vocab_size=len(tokenizer), max_position_embeddings=2048), tokenizer)


@with_tools
def test_a_template_with_tools_is_used(template: str) -> None:
    engine = tiny_engine(template)
    assert template_format(engine)[0] is not None
    plan = Plan(ToolRequest.of([MOVE]), engine)
    messages, options = plan.prompt(TALK)
    assert messages == TALK
    assert options == {"tools": [MOVE]}
    text = engine.render_chat(messages, **options)
    assert "Move." in text
    assert '"km"' in text
    assert "done" in text


@pytest.mark.slow
@with_tools
@pytest.mark.parametrize(("choice", "tags_are_tokens"), [("required", False), ("move", True)])
def test_a_forced_call_is_held_to_the_template_s_format(template: str, choice: str, tags_are_tokens: bool) -> None:
    engine = tiny_engine(template, tags_are_tokens=tags_are_tokens)
    plan = Plan(ToolRequest.of([MOVE, STOP], tool_choice=choice), engine)
    messages, options = plan.prompt(TALK[:1])
    answer = engine.chat(
        messages, template_kwargs=options, max_new_tokens=110, gamma=0.6, logits_processor=plan.processors()
    )
    assert answer.finish_reason == "eos"
    (call,) = plan.read(answer.text).calls
    assert call.error is None
    assert call.name in (("move",) if choice == "move" else ("move", "stop"))
    if call.name == "move":
        assert call.arguments is not None
        assert isinstance(call.arguments["up"], bool)
        assert call.arguments["unit"] in ("m", "km")


@pytest.mark.parametrize(
    "template",
    [
        tool_templates.HERMES,
        tool_templates.LLAMA,
        *(tool_templates.DERIVED[kind] for kind in ("name and JSON", "parameters", "keyword arguments")),
    ],
)
@pytest.mark.parametrize("tags_are_tokens", [False, True])
@pytest.mark.parametrize("options", [{"strict": True}, {"response_format": {"type": "json_object"}}])
def test_what_is_not_forced_may_still_be_held_to_a_schema(
    template: str, options: dict[str, Any], tags_are_tokens: bool
) -> None:
    """Random weights begin no call by themselves, so the beginning of one is put in the answer's place."""
    engine = tiny_engine(template, tags_are_tokens=tags_are_tokens)
    plan = Plan(ToolRequest.of([MOVE], **options), engine)
    beginning = plan.style.write("move", {"up": 0}).partition("0")[0]
    (processor,) = plan.processors()
    prompt = engine.encode("hi")
    begun = [*prompt, *engine.encode(beginning, add_special_tokens=False)]

    class Continued:
        def __call__(self, ids: Any, scores: Any) -> Any:
            return processor.for_prompt(prompt)(ids, scores)

    answer = engine.generate(begun, max_new_tokens=60, gamma=1, logits_processor=Continued())
    call = plan.read(beginning + answer.text).calls[0]
    assert call.arguments is not None
    assert call.arguments["unit"] in ("m", "km")


def test_an_unknown_or_missing_format_is_ours() -> None:
    without = tool_templates.HERMES.replace("message.tool_calls or []", "[]")
    plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    strict = plain.replace(
        "{{ message.role }}", "{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    )
    for template in (without, plain, strict):
        engine = tiny_engine(template)
        assert template_format(engine) == (None, False)
        messages, options = Plan(ToolRequest.of([MOVE]), engine).prompt(TALK)
        assert options == {}
        assert messages[-2:] == [
            {"role": "assistant", "content": HERMES.write("move", {"up": True, "unit": "km"})},
            {"role": "user", "content": "<tool_response>\ndone\n</tool_response>"},
        ]
        first = messages[0]
        assert first["role"] == ("user" if template == strict else "system")
        assert json.dumps(PARAMETERS) in first["content"]
        assert ("Move up a km." in first["content"]) == (template == strict)
        assert "done" in engine.render_chat(messages)


def test_a_system_message_is_kept_and_nothing_given_is_changed() -> None:
    engine = tiny_engine("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    talk = [{"role": "system", "content": "Be brief."}, *TALK, {**TALK[2], "content": "again"}]
    before = copy.deepcopy(talk)
    messages, _ = Plan(ToolRequest.of([MOVE], response_format={"type": "json_object"}), engine).prompt(talk)
    assert messages[0]["content"].startswith("Be brief.\n\n# Tools")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[-1]["content"].count("<tool_response>") == 2
    assert talk == before
    alone, options = Plan(ToolRequest.of(), engine).prompt(talk[:2])
    assert (alone, options) == (talk[:2], {})
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    asked, _ = Plan(ToolRequest.of(response_format=schema), engine).prompt(talk[:2])
    assert asked[0]["content"].endswith(json.dumps(PARAMETERS))


@pytest.mark.parametrize(
    ("choice", "required", "name", "tools"),
    [
        (None, False, None, 2),
        ("auto", False, None, 2),
        (False, False, None, 2),
        ("none", False, None, 0),
        ("any", True, None, 2),
        ("required", True, None, 2),
        (True, True, None, 2),
        ("stop", True, "stop", 2),
        ({"type": "function", "function": {"name": "stop"}}, True, "stop", 2),
        ({"type": "tool", "name": "stop"}, True, "stop", 2),
        ({"type": "any"}, True, None, 2),
        (allowed("required", STOP), True, "stop", 2),
        (allowed("required", STOP, MOVE), True, None, 2),
        (allowed("auto", STOP), False, None, 2),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]}, False, None, 2),
    ],
)
def test_tool_choice(choice: Any, required: bool, name: str | None, tools: int) -> None:
    request = ToolRequest.of([MOVE, STOP], tool_choice=choice)
    assert (request.required, request.name, len(request.tools)) == (required, name, tools)
    if tools:
        assert ToolRequest.of([MOVE, STOP], tool_choice=request.tool_choice) == request  # as servers are asked
    called = [tool["name"] for tool in request.callable_tools]
    assert "stop" in called or not tools
    assert ("move" in called) == (bool(tools) and request.allowed in (None, ("move", "stop")))


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ([MOVE], {"tool_choice": "mvoe"}, "did you mean 'move'"),
        ([], {"tool_choice": "any"}, "none are given"),
        ([MOVE, STOP, MOVE], {}, "two tools have the name 'move'"),
        ([MOVE], {"tool_choice": allowed("auto", STOP)}, "tool 'stop'"),
        ([MOVE], {"tool_choice": allowed("auto")}, "allowed_tools takes"),
        ([MOVE], {"tool_choice": allowed("any", MOVE)}, "allowed_tools takes"),
        ([MOVE], {"tool_choice": {"type": "allowed_tools", "allowed_tools": "auto"}}, "allowed_tools takes"),
        ([MOVE], {"tool_choice": allowed("auto", "move")}, "names a function"),
        ([MOVE], {"tool_choice": {"type": "custom", "custom": {"name": "move"}}}, "names a function"),
        ([{"type": "web_search"}], {}, "number 0 is not"),
        ([MOVE], {"response_format": {"type": "yaml"}}, "response_format takes"),
        ([], {"response_format": {"type": "json_schema"}}, "response_format takes"),
    ],
)
def test_what_makes_no_sense_is_refused(tools: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolRequest.of(tools, **options)


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string", "default": {"properties": 1}}}}
    free = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}
    assert closed({"anyOf": [inner, free, {"type": "object"}]}) == {
        "anyOf": [{**inner, "additionalProperties": False}, free, {"type": "object"}]
    }
    assert closed({"allOf": [inner]}) == {"allOf": [inner]}
    feature = {"type": "object", "properties": {"type": {"type": "string"}, "properties": inner}}  # of GeoJSON
    assert closed(feature) == {
        "type": "object",
        "properties": {"type": {"type": "string"}, "properties": closed(inner)},
        "additionalProperties": False,
    }


A = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "title": "answer", "description": "It."}
UNMET: dict[str, dict[str, Any]] = {
    "not": {**A, "not": {"required": ["a"]}},
    "then": {**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {**A, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**A, "dependentSchemas": {"a": {"minProperties": 2}}},
    "propertyNames": {**A, "propertyNames": {"pattern": "^b"}},
    "uniqueItems": {
        **A,
        "properties": {"a": {"type": "array", "prefixItems": [{"const": 1}] * 2, "minItems": 2, "items": False,
                             "uniqueItems": True}},
    },
    "contains": {
        **A,
        "properties": {"a": {"type": "array", "prefixItems": [{"const": 1}], "minItems": 1, "items": False,
                             "contains": {"const": 2}}},
    },
    "oneOf": {**A, "oneOf": [{"required": ["a"]}, {"minProperties": 1}]},
}  # fmt: skip
"""Schemas of which a grammar leaves out the keyword, and what it leaves allows one text, which does not fit."""
QUESTION = "Answer."


@pytest.fixture(scope="module")
def engine() -> CocoaEngine:
    return engine_for_schemas()


@pytest.fixture(params=["here", "remote"])
def place(request: pytest.FixtureRequest, engine: CocoaEngine, url: str) -> dict[str, Any]:
    return {"engine": engine} if request.param == "here" else {"base_url": url}


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def tool_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "answer", "description": "It.", "parameters": schema}}


@pytest.mark.parametrize("keyword", UNMET)
def test_the_engine_refuses_what_no_grammar_enforces(engine: CocoaEngine, keyword: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot be enforced.*{keyword}"):
        engine.constrain(json_schema=UNMET[keyword])


def test_a_text_is_compared_whatever_its_class() -> None:
    """A worker imports no module for it: that of LangChain's texts takes a second."""

    class Text(str):
        """Cannot be pickled."""

    assert mismatch(Text('{"a": 1}'), {"type": "object"}) is None


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output_tells_of_a_mismatch(place: dict[str, Any], method: Any) -> None:
    chat = ChatCocoa(**place, max_tokens=80)
    result: Any = chat.with_structured_output(UNMET["uniqueItems"], method=method, include_raw=True).invoke(QUESTION)
    assert isinstance(result["parsing_error"], OutputParserException)
    assert "does not fit the schema" in str(result["parsing_error"])
    assert result["parsed"] is None
    assert result["raw"].text.startswith('{"a": ')


def test_langchain_tells_of_a_mismatch_of_calls_and_answers(engine: CocoaEngine) -> None:
    chat, schema = ChatCocoa(engine=engine, max_tokens=80), UNMET["not"]
    caller = chat.bind_tools([tool_of(schema)], tool_choice="any")
    whole, streamed = caller.invoke(QUESTION), None
    for chunk in caller.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    for message in (whole, streamed):
        assert message.tool_calls == []
        [call] = message.invalid_tool_calls
        assert call["name"] == "answer"
    assert "does not fit the schema" in whole.invalid_tool_calls[0]["error"]
    with pytest.raises(OutputParserException, match="does not fit the schema"):
        chat.with_structured_output(schema, method="function_calling").invoke(QUESTION)
    asked = chat.bind(response_format=json_format(schema))
    for call in (lambda: asked.invoke(QUESTION), lambda: list(asked.stream(QUESTION))):
        with pytest.raises(IncompleteAnswerError, match="does not fit its schema"):
            call()


@pytest.mark.parametrize("tools", [True, False])
def test_llama_index_tells_of_a_mismatch(place: dict[str, Any], tools: bool) -> None:
    llm = CocoaLLM(**place, max_tokens=80)
    options: dict[str, Any] = {"response_format": json_format(UNMET["not"])}
    if tools:
        options = {"tools": [tool_of(UNMET["not"])], "tool_choice": "required"}
    messages = [ChatMessage(content=QUESTION)]
    for call in (lambda: llm.chat(messages, **options), lambda: list(llm.stream_chat(messages, **options))):
        with pytest.raises(Exception, match="not fit"):
            call()


@pytest.mark.parametrize("keyword", UNMET)
@pytest.mark.parametrize("tools", [True, False])
async def test_the_server_tells_of_a_mismatch(engine: CocoaEngine, keyword: str, tools: bool) -> None:
    schema = UNMET[keyword]
    options: dict[str, Any] = {"response_format": json_format(schema)}
    if tools:
        options = {"tools": [tool_of(schema)], "tool_choice": "required"}
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 80, **options}
    response = await post(create_app(engine), body)
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "schema_mismatch"
    assert response.json()["error"]["param"] == ("tools" if tools else "response_format")
    streamed = await post(create_app(engine), {**body, "stream": True})
    assert json.loads(streamed.text.strip().rpartition("data: ")[2])["error"]["code"] == "schema_mismatch"


FITS: list[tuple[str, dict[str, Any]]] = [
    ("19.99", {"multipleOf": 0.01}),
    ("0.7", {"const": 0.7}),
    ("1.0", {"type": "integer"}),
    ('"日本"', {"enum": ["日本"]}),
    ('["a", 1]', {"items": [{"type": "string"}]}),  # of earlier drafts
    ("4", {"minimum": 3, "exclusiveMinimum": True}),
    ("4", {"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 2}),
    ('"é"', {"pattern": r"^\p{L}$"}),  # no expression of Python, but the grammar enforces it
    ("1", {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}}}),
    ('{"a": 1', A),  # it was cut off, which is told elsewhere
]
DOES_NOT_FIT: list[tuple[str, dict[str, Any]]] = [
    ("19.999", {"multipleOf": 0.01}),
    ("0", {"exclusiveMinimum": 0, "exclusiveMaximum": 0.001}),
    ("9223372036854775807", {"minimum": 10**30}),
    ("true", {"type": "integer"}),
    ("[1]", {"items": [{"type": "string"}]}),
    ("3", {"minimum": 3, "exclusiveMinimum": True}),
    ("3", {"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 2}),
    ("1e99999999999999999999999", {"type": "number"}),
    ("1", {"not": {"$ref": "http://127.0.0.1:9/nothing.json"}}),
]


@pytest.mark.parametrize(("text", "schema"), FITS + DOES_NOT_FIT)
def test_what_does_not_fit_is_told_and_nothing_else(text: str, schema: dict[str, Any]) -> None:
    if (text, schema) in FITS:
        enforceable(schema)
    assert (mismatch(text, schema) is None) == ((text, schema) in FITS)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/b"}, A], "$defs": {"b": {**A, "properties": {"b": True}, "required": ["b"]}}},
        {**A, "oneOf": [{**A, "properties": {"b": {"const": 1}}, "required": ["b"]}, {**A, "required": ["c"]}]},
        {**A, "required": ["z"]},
    ],
)
def test_a_schema_whose_parts_share_an_object_is_not_refused(engine: CocoaEngine, schema: dict[str, Any]) -> None:
    [processor] = Plan(ToolRequest.of(response_format=json_format(schema)), engine).processors()
    assert walk(processor.for_prompt([]), random.Random(1))


@pytest.mark.parametrize("schema", [{"pattern": "(?=a)b"}, {"title": 5}, {"not": {"pattern": r"\p{L}"}}])
def test_what_can_be_neither_enforced_nor_validated_is_refused_at_once(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        enforceable(schema)
    assert "%json" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        *({"$schema": value, "type": "object"} for value in (["x"], {"x": 1}, -1, True, None)),
        *({"$ref": value} for value in ({"$ref": "#"}, [{"$ref": "#"}], 5)),
        *({"anyOf": [{"$ref": "#"}], key: value} for key, value in (("anyOf", 5), ("allOf", 1.5), ("allOf", {"x": 1}))),
        {"$defs": {"a": {"type": "array", "minItems": "x", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": [["a"]]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": 1e308},
    ],
    ids=str,
)
def test_a_keyword_of_a_wrong_type_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        enforceable(schema)


NUMBERS = [
    sign * number
    for sign in (1, -1)
    for number in (0, 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 1e300)
]


@pytest.mark.slow
@fuzz(60)
@given(
    st.dictionaries(
        st.sampled_from(["const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.sampled_from(NUMBERS),
        min_size=1,
        max_size=2,
    ),
    st.sampled_from(["integer", "number"]),
)
def test_every_number_is_enforced_validated_or_refused(limits: dict[str, Any], kind: str) -> None:
    """llguidance itself rounds large numbers, and ends the process at some."""
    schema = {"type": kind, **limits}
    try:
        [processor] = Plan(ToolRequest.of(response_format=json_format(schema)), engine_for_schemas()).processors()
    except ConfigError as refused:
        assert "%json" not in str(refused)  # noqa: PT017
        return
    text = walk(processor.for_prompt([]), random.Random(0))
    assert unenforced(schema) or "const" not in limits or text is None or mismatch(text, schema) is None


@pytest.mark.parametrize("bounds", [(-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(10**30), 10**30)])
def test_bounds_of_wide_integers_are_taken(bounds: tuple[int, int]) -> None:
    schema = {"type": "integer", "minimum": bounds[0], "maximum": bounds[1]}
    [processor] = Plan(ToolRequest.of(response_format=json_format(schema)), engine_for_schemas()).processors()
    assert walk(processor.for_prompt([]), random.Random(0))
    assert mismatch(str(bounds[1]), schema) is None
    assert mismatch(str(bounds[1] + 1), schema)


@pytest.mark.parametrize("value", [2**53 + 1, -(2**63), [1, {"a": 2**64}]])
@pytest.mark.parametrize("key", ["const", "enum"])
def test_a_value_that_a_grammar_would_round_is_refused_at_once(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{key} has .* beyond 2\*\*53"):
        ToolRequest.of(response_format=json_format({key: value if key == "const" else [value, 1]}))


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, 1000])
@pytest.mark.parametrize("backwards", [True, False])
def test_references_inside_each_other_never_end_the_process(count: int, backwards: bool) -> None:
    definitions: dict[str, Any] = {
        f"d{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}, "required": ["a"]}
        for number in range(count)
    }
    definitions[f"d{count}"] = {"type": "integer"}
    names = sorted(definitions, reverse=backwards)
    schema = {"$ref": "#/$defs/d0", "$defs": {name: definitions[name] for name in names}}
    if count < 200:
        assert enforceable(schema)
    else:
        with pytest.raises(ConfigError, match="nested too deeply"):
            enforceable(schema)


NAMES = ("a", "b", "c")
REFERENCES = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])
LINKED = st.recursive(
    st.one_of(REFERENCES, st.sampled_from([{"type": "integer"}, {"const": 1}, {"type": "null"}])),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.builds(
            lambda parts, needed: {
                "type": "object",
                "properties": parts,
                "required": [name for name in needed if name in parts],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
            st.sets(st.sampled_from("xy")),
        ),
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 2)),
    ),
    max_leaves=4,
)


@pytest.mark.slow
@fuzz(40)
@example(
    {**{name: {"$ref": "#/$defs/a"} for name in NAMES}, "a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}},
    {"$ref": "#/$defs/a"},
    0,
)
@given(st.fixed_dictionaries(dict.fromkeys(NAMES, LINKED)), LINKED, st.integers(0, 99))
def test_no_answer_is_refused_in_its_middle(definitions: dict[str, Any], schema: dict[str, Any], seed: int) -> None:
    """Also with references in a circle: those that no finite value fits are never begun."""
    request = json_format({**schema, "$defs": definitions})
    try:
        plan = Plan(ToolRequest.of(response_format=request), engine_for_schemas())
        [processor] = plan.processors()
    except ConfigError:
        return
    text = walk(processor.for_prompt([]), random.Random(seed))
    assert text is None or plan.read(text).content == text


@pytest.mark.slow
def test_a_sample_of_the_json_schema_test_suite() -> None:
    source = source_if_there("jsonschema")
    for draft in DRAFTS:
        for schema in [*schemas_of(source, draft)][::25]:
            assert not outcome(draft, schema).startswith("WRONG"), outcome(draft, schema)
