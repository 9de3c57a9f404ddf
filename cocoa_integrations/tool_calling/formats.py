"""The formats in which models write tool calls, and how a prompt describes the tools to them."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from itertools import groupby
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ChatTemplateError, PromptError
from cocoa_integrations._shared.options import names
from cocoa_integrations._shared.reasoning import ReasoningTags
from cocoa_integrations.tool_calling.call_format import CallFormat
from cocoa_integrations.tool_calling.derivation import (
    QUESTION,
    TOOL_NAME,
    TOOLS,
    Render,
    derived,
    reasoning_tags,
    text_ends,
)
from cocoa_integrations.tool_calling.json_text import object_of

HERMES = CallFormat(
    before='<tool_call>\n{"name": "', between='", "arguments": ', after="}\n</tool_call>", separator="\n"
)
"""Also of Qwen 2.5 and 3 and many others, and of our own prompt."""

Result = TypeVar("Result")
_derived: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""By tokenizer: what each function derived from a chat template of it."""


def _once(derive: Callable[[CocoaEngine], Result]) -> Callable[[CocoaEngine], Result]:
    """The function, which is called once for each chat template of a tokenizer."""

    @wraps(derive)
    def held(engine: CocoaEngine) -> Result:
        tokenizer = engine.tokenizer
        names = ("chat_template", "special_tokens_map")
        key = derive, repr([getattr(tokenizer, name, None) for name in names])
        results = _derived.setdefault(tokenizer, {})
        if key not in results:
            results[key] = derive(engine)
        result: Result = results[key]
        return result

    return held


@_once
def template_format(engine: CocoaEngine) -> tuple[CallFormat | None, bool]:
    """The format in which a chat template writes tool calls, and whether it describes the tools in the prompt.

    The format is ``None`` if the template writes no calls, or none that can be read.
    """
    asked = _rendering(engine, tools=TOOLS)([QUESTION], True)
    described = asked is not None and TOOL_NAME in asked
    style = derived(_rendering(engine, tools=TOOLS) if described else _rendering(engine))
    return style, described and style is not None


@_once
def template_reasoning(engine: CocoaEngine) -> ReasoningTags:
    """What a chat template writes around reasoning; ``<think>`` and ``</think>`` if it writes none."""
    renders = [_rendering(engine, **options) for options in ({}, {"tools": TOOLS})]
    reads = any(names(engine, field) for field in ("reasoning", "thinking"))
    tags = next(filter(None, map(reasoning_tags, renders if reads else ())), ReasoningTags())
    return replace(tags, feet=text_ends(renders[1]))


def _rendering(engine: CocoaEngine, **options: Any) -> Render:
    def render(messages: Sequence[Mapping[str, Any]], begin: bool) -> str | None:
        try:
            return engine.render_chat(messages, split_special_tokens=False, add_generation_prompt=begin, **options)
        except (ChatTemplateError, PromptError):  # the template takes no blocks of reasoning
            return None

    return render


_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, {lead}:
{call}"""
_HERMES_LEAD = "return a json object with function name and arguments within <tool_call></tool_call> XML tags"

SCHEMA = """Answer with one JSON object that fits this JSON schema, and with nothing else:
{schema}"""


def tools_text(tools: Sequence[Mapping[str, Any]], style: CallFormat) -> str:
    """A description of tools, and of calls in a format."""
    shown = ("name", "description", "parameters")
    functions = [{key: tool["function"][key] for key in shown} for tool in tools]
    lines = [json.dumps({"type": "function", "function": each}, ensure_ascii=False) for each in functions]
    call = style.write("<function-name>", {"<argument-name>": "<value>"}).strip()
    if style.parameters is None:
        call = call.replace('{"<argument-name>": "<value>"}', "<args-json-object>")
    call = call.replace('"<function-name>"', "<function-name>")
    lead = _HERMES_LEAD if style == HERMES else "write the function name and its arguments exactly like this"
    return _TOOLS.format(tools="\n".join(lines), lead=lead, call=call)


def as_plain_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    for is_result, turn in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:  # one message for all results of a turn: many templates require alternating roles
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in turn]
            plain.append({"role": "user", "content": "\n".join(results)})
            continue
        for message in turn:
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            written = [HERMES.write(each["name"], each["arguments"]) for each in functions]
            content = "\n".join([*filter(None, [message["content"]]), *written]) if written else message["content"]
            plain.append({**rest, "content": content})
    return plain


def one_call_each(messages: Sequence[Mapping[str, Any]], *, takes_text: bool) -> list[dict[str, Any]]:
    """The messages, of which none has several calls, or text and a call unless the template takes them.

    Llama's template refuses or drops these. The result of a call follows it.
    """
    divided: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool":
            ids = [[call.get("id") for call in each.get("tool_calls", ())] for each in divided]
            asked = (number + 1 for number in reversed(range(len(ids))) if message.get("tool_call_id") in ids[number])
            divided.insert(next(asked, len(divided)), dict(message))
            continue
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        if not calls or (message["content"] and not takes_text):
            divided.append(rest)
            rest = {"role": rest["role"], "content": ""}
        for call in calls:
            divided.append({**rest, "tool_calls": [call]})
            rest = {"role": rest["role"], "content": ""}
    return divided


def with_encoded_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON in a string, as some templates take them."""
    encoded: list[dict[str, Any]] = deepcopy([*map(dict, messages)])
    for function in (call["function"] for message in encoded for call in message.get("tool_calls") or ()):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return encoded


def invalid_call_text(name: str | None, written: str) -> str:
    """An invalid call of an earlier answer, as text of a prompt. ``written`` is all of a call without a name."""
    if not name:
        return written
    end = "" if object_of(written) is None else "}"
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}{end}'


def with_instructions(messages: Sequence[Mapping[str, Any]], text: str, engine: CocoaEngine) -> list[dict[str, Any]]:
    """The messages with a text added to their system message, or before the first if there is no system role."""
    first, rest = messages[0], messages[1:]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *map(dict, rest)]
    system = {"role": "system", "content": text}
    try:
        engine.render_chat([system, {"role": "user", "content": "b"}])
    except ChatTemplateError:
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *map(dict, rest)]
    return [system, *map(dict, messages)]
