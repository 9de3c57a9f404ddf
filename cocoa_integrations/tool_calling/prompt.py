"""The description of tools and formats for models whose chat template does not support them.

It uses the format that Hermes and Qwen models were trained on: the tools in the system message, a call as
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` in the assistant message, and a result as
``<tool_response>...</tool_response>`` in the user message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ChatTemplateError
from cocoa_integrations.tool_calling.formats import HERMES

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

SCHEMA = """Answer with one JSON object that fits this JSON schema, and with nothing else:
{schema}"""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The description of the tools and of the call format, for a system message."""
    shown = ("name", "description", "parameters")
    functions = [{key: tool["function"][key] for key in shown} for tool in tools]
    lines = [json.dumps({"type": "function", "function": each}, ensure_ascii=False) for each in functions]
    return _TOOLS.format(tools="\n".join(lines))


def as_plain_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their tool calls and results as text."""
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


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, of which none has several calls, or text and a call: Llama's template refuses or drops these."""
    divided: list[dict[str, Any]] = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = message.get("tool_calls") or ()
        if message["content"] or not calls:
            divided.append(rest)
        divided += [{**rest, "content": "", "tool_calls": [call]} for call in calls]
    return divided


def invalid_call_text(name: str | None, written: str) -> str:
    """An invalid call of an earlier answer, as text of a prompt. ``written`` is all of a call without a name."""
    return written if not name else f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}'


def with_instructions(messages: Sequence[Mapping[str, Any]], text: str, engine: CocoaEngine) -> list[dict[str, Any]]:
    """The messages with a text added to their system message, or before the first if there is no system role."""
    first, rest = messages[0], messages[1:]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *map(dict, rest)]
    system = {"role": "system", "content": text}
    try:
        engine.render_chat([system, {"role": "user", "content": "b"}])
    except ChatTemplateError:
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *map(dict, rest)]
    return [system, *map(dict, messages)]
