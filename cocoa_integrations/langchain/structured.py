"""Parsers for structured output. An answer that was cut off raises an error; it never becomes a partial object."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1

from cocoa_engine.errors import ConfigError
from cocoa_integrations.tool_calling.schemas import mismatch

TITLE = "answer"
"""The tool name of a schema without a title."""

_HINTS: dict[str | None, str] = {
    "length": ": it was cut off, raise max_tokens (or set repetition_penalty=1.1 if it repeats itself)",
    "risk": ": it was cut off where its risk reached max_risk",
    "stop": ": a stop text or criterion ended it",
}
"""A hint about an incomplete answer, by its finish reason."""


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class or a TypedDict, or the given JSON schema.

    Raises:
        ConfigError: LangChain cannot convert it to a JSON schema.
    """
    if _is_plain(schema):
        return dict(schema)
    if _is_class(schema) and issubclass(schema, BaseModel) and _is_recursive(own := schema.model_json_schema()):
        return own  # LangChain inlines definitions, and replaces recursive ones by "anything"
    try:
        return dict(convert_to_json_schema(schema))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{schema!r} is not a schema: give a pydantic class, a TypedDict or a JSON schema") from error


def with_title(schema: Any) -> Any:
    """The schema. A JSON schema without a title gets one, which becomes the name of the tool."""
    untitled = _is_plain(schema) and "title" not in schema and schema.keys() & {"type", "properties"}
    return {"title": TITLE, **schema} if untitled else schema


def _is_plain(schema: Any) -> bool:
    """Whether it is a bare JSON schema, rather than the description of a function with a schema inside."""
    return isinstance(schema, Mapping) and not schema.keys() & {"function", "parameters", "input_schema", "schema"}


def _is_recursive(schema: Mapping[str, Any]) -> bool:
    """Whether a definition of a schema refers to itself, directly or through others."""
    definitions = schema.get("$defs", {})
    refers_to = {
        name: {other for other in definitions if f'"#/$defs/{other}"' in json.dumps(definition)}
        for name, definition in definitions.items()
    }
    for name in definitions:
        reached: set[str] = set()
        frontier: set[str] = {name}
        while frontier:
            frontier = {found for other in frontier for found in refers_to[other]} - reached
            reached |= frontier
        if name in reached:
            return True
    return False


class WholeJsonParser(BaseCumulativeTransformOutputParser[Any]):
    """Parses the JSON of an answer, and partial JSON while it streams.

    LangChain's own parser completes JSON that was cut off.
    """

    schema_class: Any = None
    """The pydantic class of the result, or ``None`` for plain JSON values."""
    json_schema: dict[str, Any] | None = None
    """The schema of a complete answer."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value of an answer. For a partial answer, the value so far, or ``None``.

        Raises:
            OutputParserException: a complete answer is not JSON, or does not validate.
        """
        info = getattr(getattr(result[0], "message", None), "response_metadata", {})
        if partial and "finish_reason" not in info:
            try:
                return self._validated(parse_partial_json(result[0].text))
            except (ValueError, RecursionError, ValidationErrorV1):  # pydantic 2 raises a ValueError
                return None
        text = result[0].text
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:  # also for thousands of digits or nested brackets
            hint = _HINTS.get(info.get("finish_reason"), "")
            raise OutputParserException(f"the answer is not complete JSON ({error}){hint}", llm_output=text) from error
        if self.json_schema is not None and (wrong := mismatch(text, self.json_schema)):
            raise OutputParserException(f"the answer does not fit the schema: {wrong}", llm_output=text)
        try:
            return self._validated(value)
        except (ValidationError, ValidationErrorV1) as error:
            raise OutputParserException(f"the answer does not fit the schema: {error}", llm_output=text) from error

    def parse(self, text: str) -> Any:
        """Like :meth:`parse_result`, for a text."""
        return self.parse_result([Generation(text=text)])

    def _validated(self, value: Any) -> Any:
        if self.schema_class is None or value is None:
            return value
        if issubclass(self.schema_class, BaseModel):
            return self.schema_class.model_validate(value)
        return self.schema_class.parse_obj(value)


def json_parser(schema: Any, json_schema: dict[str, Any] | None) -> Runnable[Any, Any]:
    """A runnable from a message with JSON that fits a schema to an object of the schema's class, or to a dict."""
    return WholeJsonParser(schema_class=schema if _is_class(schema) else None, json_schema=json_schema)


def tool_parser(schema: Any) -> Runnable[Any, Any]:
    """A runnable from a message with a tool call to an object of the schema's class, or to a dict of its arguments."""
    checked: Runnable[Any, Any] = RunnableGenerator(_require_calls, _arequire_calls)
    if _is_class(schema):
        return checked | PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return checked | JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def structured(model: Runnable[Any, Any], parser: Runnable[Any, Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """``model | parser``; with ``include_raw``, the result is a dict of ``raw``, ``parsed`` and ``parsing_error``."""
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _is_class(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _require_calls(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Pass messages on, and raise an error at the end if their sum has no valid tool call."""
    total: Any = None
    for message in messages:
        total = message if total is None else total + message
        yield message
    _require_call(total)


async def _arequire_calls(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    total: Any = None
    async for message in messages:
        total = message if total is None else total + message
        yield message
    _require_call(total)


def _require_call(message: Any) -> None:
    if isinstance(message, AIMessage) and not message.tool_calls:
        reason = next((call["error"] for call in message.invalid_tool_calls if call["error"]), None)
        hint = _HINTS.get(message.response_metadata.get("finish_reason"), "")
        raise OutputParserException(
            f"the answer contains no complete tool call: {reason or 'it is not valid JSON'}{hint}",
            llm_output=message.text,
        )
