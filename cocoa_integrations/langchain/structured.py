"""From an answer in JSON to the object that was asked for. One that was cut off is an error, never half an object."""

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

TITLE = "answer"
"""What the tool of a schema without a title is called."""

_CUT: dict[Any, str] = {
    "length": ": it was cut off, raise max_tokens",
    "risk": ": it was cut off where its risk reached max_risk",
    "stop": ": a stop text or criterion ended it",
}
"""What to say of an answer that is not complete, by its finish reason."""


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, a TypedDict, or one given as it is.

    Raises:
        ConfigError: it is nothing that LangChain can make one of.
    """
    if _is_plain(schema):
        return dict(schema)
    if _is_class(schema) and issubclass(schema, BaseModel) and _is_recursive(own := schema.model_json_schema()):
        return own  # LangChain writes definitions out, and what refers to itself as "anything"
    try:
        return dict(convert_to_json_schema(schema))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{schema!r} is no schema: give a pydantic class, a TypedDict or a JSON schema") from error


def with_title(schema: Any) -> Any:
    """The schema; a JSON schema has a title then, which the tool made of it is called by."""
    untitled = _is_plain(schema) and "title" not in schema and schema.keys() & {"type", "properties"}
    return {"title": TITLE, **schema} if untitled else schema


def _is_plain(schema: Any) -> bool:
    """Whether it is a JSON schema as it is, not one within the description of a function."""
    return isinstance(schema, Mapping) and not schema.keys() & {"function", "parameters", "input_schema", "schema"}


def _is_recursive(schema: Mapping[str, Any]) -> bool:
    """Whether a definition of a schema leads back to itself."""
    definitions = schema.get("$defs", {})
    leads_to = {
        name: {other for other in definitions if f'"#/$defs/{other}"' in json.dumps(definition)}
        for name, definition in definitions.items()
    }
    for name in definitions:
        reached: set[str] = set()
        fresh: set[str] = {name}
        while fresh:
            fresh = {found for other in fresh for found in leads_to[other]} - reached
            reached |= fresh
        if name in reached:
            return True
    return False


class WholeJsonParser(BaseCumulativeTransformOutputParser[Any]):
    """Reads the JSON of an answer; while it streams, what is there of it so far.

    LangChain's own parser completes JSON that was cut off.
    """

    schema_class: Any = None
    """A pydantic class that the answer becomes an object of."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value of the answer; of a part of one, the value so far or None.

        Raises:
            OutputParserException: a complete answer is no JSON, or does not fit the class.
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
        except (ValueError, RecursionError) as error:  # also of thousands of digits, or of brackets
            cut = _CUT.get(info.get("finish_reason"), "")
            raise OutputParserException(f"the answer is no complete JSON ({error}){cut}", llm_output=text) from error
        try:
            return self._validated(value)
        except (ValidationError, ValidationErrorV1) as error:
            raise OutputParserException(f"the answer does not fit the schema: {error}", llm_output=text) from error

    def parse(self, text: str) -> Any:
        """As :meth:`parse_result`, of a text."""
        return self.parse_result([Generation(text=text)])

    def _validated(self, value: Any) -> Any:
        if self.schema_class is None or value is None:
            return value
        if issubclass(self.schema_class, BaseModel):
            return self.schema_class.model_validate(value)
        return self.schema_class.parse_obj(value)


def json_parser(schema: Any) -> Runnable[Any, Any]:
    """From a message with JSON to an object of the schema's class, or a dict."""
    return WholeJsonParser(schema_class=schema if _is_class(schema) else None)


def tool_parser(schema: Any) -> Runnable[Any, Any]:
    """From a message with one tool call to an object of the schema's class, or a dict of its arguments."""
    whole: Runnable[Any, Any] = RunnableGenerator(_whole_calls, _awhole_calls)
    if _is_class(schema):
        return whole | PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return whole | JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def structured(model: Runnable[Any, Any], parser: Runnable[Any, Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """The model and the parser; with ``include_raw``, a dict of ``raw``, ``parsed`` and ``parsing_error``."""
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _is_class(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _whole_calls(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """The same messages, and an error at their end if there was no call that can be read."""
    whole: Any = None
    for message in messages:
        whole = message if whole is None else whole + message
        yield message
    _require_call(whole)


async def _awhole_calls(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    whole: Any = None
    async for message in messages:
        whole = message if whole is None else whole + message
        yield message
    _require_call(whole)


def _require_call(message: Any) -> None:
    if isinstance(message, AIMessage) and not message.tool_calls:
        fault = next((call["error"] for call in message.invalid_tool_calls if call["error"]), None)
        cut = _CUT.get(message.response_metadata.get("finish_reason"), "")
        raise OutputParserException(
            f"the answer holds no complete tool call: {fault or 'it is no valid JSON'}{cut}", llm_output=message.text
        )
