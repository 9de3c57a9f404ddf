"""What the chat model and its remote form have in common: tools, structured output, and calls with other options."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from typing_extensions import Self

from cocoa_engine.errors import ConfigError
from cocoa_engine.messages import unknown
from cocoa_integrations.langchain.composed import Composable
from cocoa_integrations.langchain.structured import TITLE, as_tool, json_parser, json_schema_of, structured, tool_parser
from cocoa_integrations.langchain.tools import openai_tool

STRUCTURED_METHODS = ("json_schema", "function_calling", "json_mode")


class CocoaChat(Composable, BaseChatModel):
    """Base of :class:`ChatCocoa` and :class:`ChatCocoaRemote`."""

    if TYPE_CHECKING:  # fields of both
        alpha: Any
        source: Sequence[Any]

    @abstractmethod
    def calls_like(self, other: Self) -> bool:
        """Whether calls of both models have the same options and tools."""

    @abstractmethod
    def prompt_text(self, given: LanguageModelInput) -> str:
        """The text of the prompt of a call, as far as it is known."""

    @abstractmethod
    async def aprompt_text(self, given: LanguageModelInput) -> str:
        """See :meth:`prompt_text`."""

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools that it can call.

        Args:
            tools: functions, LangChain tools, pydantic classes, TypedDicts or tools in OpenAI's format.
            tool_choice: ``"auto"``: the model decides. ``"any"``, ``"required"`` or ``True``: the model must call a
                tool. A name, or ``{"type": "function", "function": {"name": ...}}``: the model must call this tool. A
                required call is constrained by a grammar. ``"none"``: the tools are not offered to the model. The
                default is ``initial_tool_choice`` of the model, or else ``"auto"``.
            strict: ``True`` also constrains calls that the model decides to make to the JSON schema of their tool.
            parallel_tool_calls: whether an answer may contain several calls. The default is ``True`` if the model
                decides, and ``False`` if a call is required. With ``False``, further calls are listed as invalid.
            **kwargs: options of a call, such as ``response_format``.

        Raises:
            ConfigError: a tool cannot be converted, ``tool_choice`` names an unknown tool, or an option is unknown.
        """
        details = {"tool_choice": tool_choice, "strict": strict, "parallel_tool_calls": parallel_tool_calls}
        given = {name: value for name, value in {**details, **kwargs}.items() if value is not None}
        self.with_options({"tools": tools, **given})  # reports errors now rather than at the first call
        if not tools and not given.keys() - details.keys():
            return self
        return self.bind(tools=[openai_tool(tool, strict=strict) for tool in tools], **given)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with structured output: its answers are objects, whose JSON schema is enforced token by token.

        Args:
            schema: a pydantic class, a TypedDict or a JSON schema. Objects have no properties besides the declared
                ones, unless the schema allows them. Optional only for ``"json_mode"``.
            method: ``"json_schema"``: the answer is JSON, and the system message contains the schema.
                ``"function_calling"``: the answer is a tool call with these arguments. ``"json_mode"``: the answer is
                JSON, and your prompt describes its content.
            include_raw: return ``{"raw": message, "parsed": object or None, "parsing_error": error or None}``.
            strict: accepted for compatibility; the schema is always enforced.
            **kwargs: options of a call.

        Returns:
            A runnable from a prompt to an object of the pydantic class, or to a dict.

        Raises:
            ConfigError: a method or an option is unknown, or the schema is missing or not a schema.
            OutputParserException: raised by the returned runnable if the answer was cut off (by ``max_tokens``) or does
                not validate.
        """
        if method not in STRUCTURED_METHODS:
            raise ConfigError(f"with_structured_output: {unknown([method], STRUCTURED_METHODS, what='method')}")
        if schema is None and method != "json_mode":
            raise ConfigError(f"with_structured_output: method={method!r} takes a schema")
        json_schema = None if schema is None else json_schema_of(schema)
        traced = {"kwargs": {"method": method}, "schema": {"title": TITLE, **(json_schema or {})}}
        options = {**kwargs, "ls_structured_output_format": traced}
        if method == "function_calling":
            model = self.bind_tools([as_tool(schema)], tool_choice="any", **options)
            return structured(model, tool_parser(schema), include_raw=include_raw)
        enforced = {"schema": json_schema, "strict": False}  # the parser validates what no grammar enforces
        if json_schema is None:
            response_format: dict[str, Any] = {"type": "json_object"}
        elif method == "json_mode":
            response_format = {"type": "json_object", **enforced}
        else:
            response_format = {"type": "json_schema", "json_schema": enforced}
        self.with_options({**kwargs, "response_format": response_format})
        model = self.bind(response_format=response_format, **options)
        return structured(model, json_parser(schema, json_schema), include_raw=include_raw)
