"""Structured output whose responses have the risk of every field, and how the LLM calls functions."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.tools.types import AsyncBaseTool, BaseTool, ToolMetadata, ToolOutput, adapt_to_async_tool
from typing_extensions import Self

from cocoa_engine.report import RISK_KEY, Detail
from cocoa_integrations.llama_index.callbacks import RiskCollector
from cocoa_integrations.llama_index.messages import arguments_of
from cocoa_integrations.tool_calling.schema_forms import function_of, json_schema

if TYPE_CHECKING:
    from llama_index.core.chat_engine.types import AgentChatResponse


class RiskStructuredLLM(StructuredLLM):
    """What :meth:`CocoaLLM.as_structured_llm` returns: LlamaIndex's structured LLM, with the risk in its responses.

    ``additional_kwargs["cocoa_risk"]`` of a response is the report of the answer; see
    :func:`~cocoa_integrations.llama_index.field_risks`. A streamed answer has it in a further response at the end,
    which repeats the last object.
    """

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The object, as JSON and in ``raw``, with its risk."""
        with (collector := RiskCollector()):
            response = super().chat(messages, **kwargs)
        return self._reported(response, collector, kwargs, "compact")

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like :meth:`chat`, without blocking the event loop."""
        with (collector := RiskCollector()):
            response = await super().achat(messages, **kwargs)
        return self._reported(response, collector, kwargs, "compact")

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """The object as it grows, then once more with its risk."""
        with (collector := RiskCollector()):
            partial = super().stream_chat(messages, **kwargs)

        def responses() -> ChatResponseGen:
            last = None
            with closing(collector.reading(partial)) as read:
                for last in read:
                    yield last
            if last is not None:
                yield self._reported(last.model_copy(), collector, kwargs, "full")

        return responses()

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like :meth:`stream_chat`, without blocking the event loop."""
        with (collector := RiskCollector()):
            partial = await super().astream_chat(messages, **kwargs)

        async def responses() -> ChatResponseAsyncGen:
            last = None
            async with aclosing(collector.areading(partial)) as read:
                async for last in read:
                    yield last
            if last is not None:
                yield self._reported(last.model_copy(), collector, kwargs, "full")

        return responses()

    def _reported(
        self, response: ChatResponse, collector: RiskCollector, options: Mapping[str, Any], default: Detail
    ) -> ChatResponse:
        """The response with the report of the last answer, in the detail that the LLM or the call asks for."""
        detail = options.get("risk_metadata") or getattr(self.llm, "risk_metadata", None) or default
        if collector.reports and detail != "none":
            report = collector.reports[-1]
            report = report if detail == "full" else report.compact()  # the text is that of the object
            response.additional_kwargs = {**response.additional_kwargs, RISK_KEY: report.to_dict()}
        return response


class CallsFunctions(FunctionCallingLLM, CustomLLM):
    """The part of :class:`CocoaLLM` that calls functions."""

    _tool_required: bool = PrivateAttr(default=False)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls of a response, or of a chunk of one; a ``ValueError`` if there is none and one is expected."""
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise ValueError(f"expected at least one tool call, but the answer is {response.message.content!r}")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=arguments_of(call) or {}
            )
            for call in blocks
        ]

    def as_structured_llm(self, output_cls: type[BaseModel], **kwargs: Any) -> RiskStructuredLLM:
        """This LLM with answers that are objects of a pydantic class. Responses have the risk of every field.

        Args:
            output_cls: the class.
            **kwargs: options of LlamaIndex's ``StructuredLLM``.
        """
        return RiskStructuredLLM(llm=self, output_cls=output_cls, **kwargs)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        choice = kwargs.pop("tool_choice", None)
        required = tool_required or self._tool_required
        functions = []
        for tool in tools:  # LlamaIndex's own schema of a class leaves out a `$ref` and others
            metadata = tool.metadata
            schema = metadata.get_parameters_dict() if metadata.fn_schema is None else json_schema(metadata.fn_schema)
            functions.append(function_of({**schema, "title": metadata.get_name(), "description": metadata.description}))
        return {
            "messages": [*(chat_history or []), *([] if user_msg is None else [user_msg])],
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": choice or ("required" if required and tools else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls and choice in (None, "auto"),
            **kwargs,
        }

    def predict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> "AgentChatResponse":
        """As in LlamaIndex, also for a tool whose arguments are those of a recursive class."""
        return super().predict_and_call([_with_properties(tool) for tool in tools], *args, **kwargs)

    async def apredict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> "AgentChatResponse":
        """See :meth:`predict_and_call`."""
        return await super().apredict_and_call([_with_properties(tool) for tool in tools], *args, **kwargs)

    def _structured_stream_call(self, *args: Any, **kwargs: Any) -> Any:
        return super(CallsFunctions, self._requiring())._structured_stream_call(*args, **kwargs)

    async def _structured_astream_call(self, *args: Any, **kwargs: Any) -> Any:
        return await super(CallsFunctions, self._requiring())._structured_astream_call(*args, **kwargs)

    def _requiring(self) -> Self:
        """A copy that must call a tool. LlamaIndex does not request this for structured streams."""
        copy = self.model_copy()
        copy._tool_required = True
        return copy


def _with_properties(tool: BaseTool) -> BaseTool:
    """The tool, or a form of it that LlamaIndex can call, where its own JSON schema of the arguments is a ``$ref``."""
    return tool if "properties" in tool.metadata.get_parameters_dict() else _RecursiveTool(tool)


class _RecursiveMetadata(ToolMetadata):
    def get_parameters_dict(self) -> dict[str, Any]:
        return json_schema(self.fn_schema)


class _RecursiveTool(AsyncBaseTool):
    def __init__(self, tool: BaseTool) -> None:
        self._tool = adapt_to_async_tool(tool)
        self._metadata = _RecursiveMetadata(**vars(tool.metadata))

    @property
    def metadata(self) -> ToolMetadata:
        return self._metadata

    # without the positional argument that LlamaIndex tries first

    def call(self, **kwargs: Any) -> ToolOutput:  # type: ignore[override]
        return self._tool.call(**kwargs)

    async def acall(self, **kwargs: Any) -> ToolOutput:  # type: ignore[override]
        return await self._tool.acall(**kwargs)
