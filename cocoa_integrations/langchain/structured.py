"""Tools and schemas in every form that LangChain takes, and parsers, which never make an object of a cut-off answer."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool, Tool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_function
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel

from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import short_repr, shortened
from cocoa_integrations.tool_calling import ToolRequest
from cocoa_integrations.tool_calling.schema_forms import function_of, json_schema, reader_of, standard
from cocoa_integrations.tool_calling.schemas import mismatch

TITLE = "answer"  # the tool name of a schema without a title
_DESCRIBES_FUNCTION = frozenset({"name", "function", "json_schema", "toolSpec"})  # not keywords of JSON schemas
_SAYS_WHAT_FITS = frozenset({"type", "properties", "$ref", "anyOf", "oneOf", "allOf"})
_HINTS: dict[str | None, str] = {  # by the finish reason of an incomplete answer
    "length": ": it was cut off, raise max_tokens (or set repetition_penalty=1.1 if it repeats itself)",
    "risk": ": it was cut off where its risk reached max_risk",
    "stop": ": a stop text or criterion ended it",
}


def tool_request(options: Mapping[str, Any]) -> ToolRequest:
    """The tools, of every type that LangChain accepts, and the response format that the options of a call ask for."""
    strict = options.get("strict")
    tools = openai_tools(options.get("tools") or (), strict=strict)
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


def openai_tools(tools: Any, *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools in OpenAI's format; a ``ConfigError`` if they are no list, or one cannot be converted."""
    if isinstance(tools, (str, Mapping, BaseModel)) or not isinstance(tools, Iterable):
        raise ConfigError(f"tools takes a list of tools, not {short_repr(tools)}")
    return [openai_tool(tool, strict=strict) for tool in tools]


def openai_tool(tool: Any, *, strict: bool | None = None) -> dict[str, Any]:
    """A tool in OpenAI's format; a ``ConfigError`` if it cannot be converted."""
    try:
        if isinstance(tool, Mapping):
            function = function_of(tool)
        elif isinstance(tool, Tool) and not tool.args_schema:  # its one argument has no type
            function = dict(convert_to_openai_function(tool))
        else:  # LangChain's own conversion loses optional parts
            schema = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
            if not isinstance(tool, (BaseTool, type)):
                options: dict[str, Any] = {"filter_args": (), "parse_docstring": True, "include_injected": False}
                schema = create_schema_from_function(tool.__name__, tool, **options)
            made = dict(schema) if isinstance(schema, Mapping) else json_schema(schema)
            named = {"title": tool.name, "description": tool.description} if isinstance(tool, BaseTool) else {}
            function = function_of({**made, **named})
        return {"type": "function", "function": {**function, **({} if strict is None else {"strict": strict})}}
    except Exception as error:  # of the code of any type
        raise ConfigError(
            f"{short_repr(tool)} is not a tool: give a function, a LangChain tool, a pydantic class, a TypedDict, a "
            f"tool in OpenAI's format, or a JSON schema with a title ({shortened(str(error), 300)})"
        ) from error


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema of a type, or that in a dict or of the arguments of a function."""
    if isinstance(schema, Mapping) and schema.keys().isdisjoint(_DESCRIBES_FUNCTION):
        return standard(schema)
    if not (isinstance(schema, Mapping) or _is_function(schema)):
        return json_schema(schema)
    function = openai_tool(schema)["function"]
    inner = function.get("parameters", {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{function['name']!r} has no JSON schema: {short_repr(inner)}")
    return {"title": function["name"], "description": function.get("description", ""), **inner}


def as_tool(schema: Any) -> dict[str, Any]:
    made = json_schema_of(schema)
    return openai_tool({**made, "title": made.get("title") or TITLE} if made.keys() & _SAYS_WHAT_FITS else made)


def _is_function(schema: Any) -> bool:
    return inspect.isroutine(schema) or isinstance(schema, BaseTool)


def reader(schema: Any) -> Callable[[str], Any] | None:
    return None if schema is None or _is_function(schema) else reader_of(schema)


class WholeJsonParser(BaseCumulativeTransformOutputParser[Any]):
    """Parses the JSON of an answer. LangChain's own parser completes JSON that was cut off."""

    read: Any = None  # makes the result from JSON; None for plain JSON values
    json_schema: Any = None  # of a complete answer

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        info = getattr(getattr(result[0], "message", None), "response_metadata", {})
        if partial and "finish_reason" not in info:
            try:
                return validated(self.read, parse_partial_json(result[0].text))
            except (ValueError, RecursionError):
                return None
        text = result[0].text
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:  # also for thousands of digits or nested brackets
            hint = _HINTS.get(info.get("finish_reason"), "")
            raise OutputParserException(f"the answer is not complete JSON ({error}){hint}", llm_output=text) from error
        if self.json_schema is not None and (wrong := mismatch(text, self.json_schema)):
            raise OutputParserException(f"the answer does not fit the schema: {wrong}", llm_output=text)
        return validated(self.read, value)

    def parse(self, text: str) -> Any:
        return self.parse_result([Generation(text=text)])


class ArgumentsParser(JsonOutputKeyToolsParser):
    """Parses the arguments of the first call of a tool."""

    read: Any = None  # as for WholeJsonParser

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        message: Any = getattr(result[0], "message", None)
        info = getattr(message, "response_metadata", {})
        if isinstance(message, AIMessage) and not message.tool_calls and (not partial or "finish_reason" in info):
            reason = next((call["error"] for call in message.invalid_tool_calls if call["error"]), None)
            raise OutputParserException(
                f"the answer contains no complete tool call: {reason or 'it is not valid JSON'}"
                f"{_HINTS.get(info.get('finish_reason'), '')}",
                llm_output=message.text,
            )
        try:
            return validated(self.read, super().parse_result(result, partial=partial))
        except OutputParserException:
            if partial:
                return None
            raise


def validated(read: Callable[[str], Any] | None, value: Any) -> Any:
    if read is None or value is None:
        return value
    text = json.dumps(value)
    try:
        return read(text)
    except ValueError as error:  # of either version of pydantic
        raise OutputParserException(f"the answer does not fit the schema: {error}", llm_output=text) from error


def with_parser(model: Runnable[Any, Any], parser: Runnable[Any, Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """``model | parser``; with ``include_raw``, the result is a dict of ``raw``, ``parsed`` and ``parsing_error``."""
    if not include_raw:
        return model | parser
    raw: Runnable[Any, Any] = RunnableMap(raw=RunnablePassthrough())  # after the model, to which options of a call go
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return model | raw | parsed.with_fallbacks([failed], exception_key="parsing_error")
