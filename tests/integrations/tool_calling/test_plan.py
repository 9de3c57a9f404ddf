"""How tools are told to a model: by its chat template where that can, else by our own words."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest

from cocoa_engine import CocoaEngine, ConfigError
from cocoa_integrations.tool_calling import Plan, ToolRequest
from cocoa_integrations.tool_calling.formats import HERMES, template_format
from cocoa_integrations.tool_calling.schemas import closed
from tests.helpers import tool_templates
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"up": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
    "required": ["up", "unit"],
}
MOVE = {"type": "function", "function": {"name": "move", "description": "Move.", "parameters": PARAMETERS}}
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
