"""Conversion of tools and tool calls from and to LangChain's types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    BaseMessage,
    HumanMessage,
    InvalidToolCall,
    ToolCall,
    ToolCallChunk,
    ToolMessage,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.tools import BaseTool, Tool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_function
from langchain_core.utils.json import parse_partial_json
from pydantic.errors import PydanticUserError

from cocoa_engine.errors import ConfigError
from cocoa_engine.safe_text import short_repr, shortened
from cocoa_integrations.tool_calling import Call, ToolRequest, new_id
from cocoa_integrations.tool_calling.schema_forms import function_of, json_schema
from cocoa_integrations.tool_calling.streaming import CallDelta


def tool_request(options: Mapping[str, Any]) -> ToolRequest:
    """The tools and the response format that the options of a call ask for.

    Args:
        options: ``tools`` (of every type that LangChain accepts), ``tool_choice``, ``strict``, ``parallel_tool_calls``
            and ``response_format``. Other options are ignored.

    Raises:
        ConfigError: a tool cannot be converted; see also :meth:`ToolRequest.of`.
    """
    strict = options.get("strict")
    tools = [openai_tool(tool, strict=strict) for tool in options.get("tools") or ()]
    return ToolRequest.of(
        list({_without_titles(tool): tool for tool in reversed(tools)}.values())[::-1],  # as a class and its schema
        tool_choice=options.get("tool_choice"),
        strict=strict,
        parallel_tool_calls=options.get("parallel_tool_calls"),
        response_format=options.get("response_format"),
    )


def _without_titles(tool: dict[str, Any]) -> str:
    def untitled(part: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key != "title" or not isinstance(value, str)}

    try:
        return json.dumps(json.loads(json.dumps(tool), object_hook=untitled), sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # refused by the request
        return repr(id(tool))


def refuse_legacy(options: Mapping[str, Any]) -> None:
    """Refuse OpenAI's earlier names of tools.

    Raises:
        ConfigError: one is given.
    """
    if legacy := [name for name in ("functions", "function_call") if options.get(name)]:
        raise ConfigError(f"instead of {' and '.join(legacy)} give tools and tool_choice")


def openai_tool(tool: Any, *, strict: bool | None = None) -> dict[str, Any]:
    """A tool in OpenAI's format.

    Raises:
        ConfigError: LangChain cannot convert it.
    """
    try:
        return {"type": "function", "function": {**_function(tool), **({} if strict is None else {"strict": strict})}}
    except (PydanticUserError, TypeError, ValueError, AttributeError, NameError) as error:
        raise ConfigError(
            f"{short_repr(tool)} is not a tool: give a function, a LangChain tool, a pydantic class, a TypedDict, a "
            f"tool in OpenAI's format, or a JSON schema with a title ({shortened(str(error), 300)})"
        ) from error


def _function(tool: Any) -> dict[str, Any]:
    """The name, the description and the parameters of a tool. LangChain's own conversion loses optional parts."""
    if isinstance(tool, Mapping):
        return function_of(tool)
    if isinstance(tool, BaseTool):
        schema = tool.tool_call_schema if tool.args_schema or not isinstance(tool, Tool) else None
        if schema is None:  # the one argument of a Tool has no type
            return dict(convert_to_openai_function(tool))
        made = dict(schema) if isinstance(schema, Mapping) else json_schema(schema)
        made = {**made, "title": tool.name, "description": tool.description}
    elif isinstance(tool, type):
        made = json_schema(tool)
    else:
        made = json_schema(
            create_schema_from_function(
                tool.__name__, tool, filter_args=(), parse_docstring=True, include_injected=False
            )
        )
    return function_of(made)


def tool_calls(calls: Sequence[tuple[str, Call]]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Convert calls and their ids to LangChain's tool calls and invalid tool calls."""
    valid = [
        tool_call(name=call.name, args=call.arguments, id=call_id)
        for call_id, call in calls
        if call.error is None and call.name is not None and call.arguments is not None
    ]
    invalid = [
        invalid_tool_call(name=call.name, args=call.written, id=call_id, error=call.error)
        for call_id, call in calls
        if call.error is not None
    ]
    return valid, invalid


def tool_has_answered(messages: Sequence[BaseMessage]) -> bool:
    """Whether there is a tool result after the last human message."""
    last = next((message for message in reversed(messages) if isinstance(message, (HumanMessage, ToolMessage))), None)
    return isinstance(last, ToolMessage)


class ChunkWriter:
    """Converts the calls of one streamed answer to tool-call chunks."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._written: list[str] = []

    def chunk(self, delta: CallDelta) -> ToolCallChunk:
        """The chunk for the new part of a call."""
        begins = delta.number == len(self.ids)
        if begins:
            self.ids.append(new_id())
            self._written.append("")
        self._written[delta.number] += delta.written
        args = delta.written
        if delta.error is not None:
            args += invalid_ending(self._written[delta.number])
        return tool_call_chunk(
            name=delta.name, args=args, id=self.ids[delta.number] if begins else None, index=delta.number
        )


def invalid_ending(written: str) -> str:
    """An ending that makes truncated arguments invalid for LangChain, which would otherwise complete them.

    ``parse_partial_json`` fails on an unmatched bracket, and LangChain then lists the call as invalid.
    """
    endings = ("", "]", "}", '"]', '"}', '""]', '""}')
    return next((ending for ending in endings if not _can_be_completed(written + ending)), "")


def _can_be_completed(args: str) -> bool:
    try:
        return not args or isinstance(parse_partial_json(args), dict)
    except ValueError:
        return False
