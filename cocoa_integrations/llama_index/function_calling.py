"""How the LLM and its remote form call functions, and answer with objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from typing_extensions import Self

from cocoa_integrations.llama_index.messages import arguments_of
from cocoa_integrations.llama_index.structured import RiskStructuredLLM

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


class CallsFunctions(FunctionCallingLLM):
    """Base of :class:`CocoaLLM` and :class:`CocoaRemote`."""

    _tool_required: bool = PrivateAttr(default=False)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls of a response, or of a chunk of one.

        Raises:
            ValueError: there is no call, and ``error_on_no_tool_call`` is true.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise ValueError(f"expected at least one tool call, but the answer is {response.message.content!r}")
        return [
            ToolSelection(
                tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=arguments_of(block) or {}
            )
            for block in blocks
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
        return {
            "messages": [*(chat_history or []), *([] if user_msg is None else [user_msg])],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": choice or ("required" if required and tools else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls and choice in (None, "auto"),
            **kwargs,
        }

    def _structured_stream_call(self, *args: Any, **kwargs: Any) -> Any:
        return super(CallsFunctions, self._requiring())._structured_stream_call(*args, **kwargs)

    async def _structured_astream_call(self, *args: Any, **kwargs: Any) -> Any:
        return await super(CallsFunctions, self._requiring())._structured_astream_call(*args, **kwargs)

    def _requiring(self) -> Self:
        """A copy that must call a tool. LlamaIndex does not request this for structured streams."""
        copy = self.model_copy()
        copy._tool_required = True
        return copy
