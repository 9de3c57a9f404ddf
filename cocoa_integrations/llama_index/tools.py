"""Tool calls in LlamaIndex messages and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cocoa_engine import CocoaEngine, Generation
from cocoa_engine.errors import IncompleteAnswerError
from cocoa_engine.logs import safe_logger
from cocoa_integrations._shared.chat_template import ChatTemplateOptions
from cocoa_integrations._shared.reasoning import ReasoningSplitter, Split
from cocoa_integrations.llama_index.responses import Answer, Delivery, Reader
from cocoa_integrations.tool_calling import Call, Plan, Reading, ToolRequest, new_id, parts_of_report

logger = safe_logger(__name__)

TOOL_OPTIONS = frozenset({"tools", "tool_choice", "strict", "parallel_tool_calls", "response_format"})
"""Options of a chat call that ask for tools or an answer in JSON."""


def split_tools(options: Mapping[str, Any]) -> tuple[ToolRequest, dict[str, Any]]:
    """Split the options of a chat call into a request for tools or structured output, and the rest.

    Raises:
        ConfigError: see :meth:`ToolRequest.of`.
    """
    asked = {name: value for name, value in options.items() if name in TOOL_OPTIONS}
    rest = {name: value for name, value in options.items() if name not in TOOL_OPTIONS}
    return ToolRequest.of(asked.pop("tools", None), **asked), rest


class ChatReader(Reader[ChatResponse]):
    """Converts the answers of one chat call, or the partial answers of a stream, into responses with tool calls.

    Args:
        request: the tools and the response format of the call.
        engine: the engine that answers.
        delivery: what the responses carry besides their text.
        options: the options of the chat template.
    """

    def __init__(
        self, request: ToolRequest, engine: CocoaEngine, delivery: Delivery, options: ChatTemplateOptions
    ) -> None:
        super().__init__(delivery)
        self.plan = Plan(request, engine, options)
        self._ids: list[str] = []
        self._content = ""  # of the previous partial answer
        self._reasoning = ""

    def splitter(self) -> ReasoningSplitter:
        """See :meth:`Plan.splitter`."""
        return self.plan.splitter()

    def split(self, generation: Generation) -> Split:
        """See :meth:`Plan.split`."""
        return self.plan.split(generation)

    def parts(self, generation: Generation, split: Split | None) -> tuple[str, dict[str, Any]]:
        """The text outside of the reasoning and of tool calls, and the risk of the calls or of the fields of JSON."""
        assert split is not None
        reading = self.plan.read(generation.text, start=split.answer_start)
        calls = [(self._id(number), call) for number, call in enumerate(reading.calls)]
        return _content(reading, generation.text), parts_of_report(generation, self.plan, split, calls)

    def response(self, answer: Answer) -> ChatResponse:
        """The response for a complete or a partial answer.

        Raises:
            IncompleteAnswerError: a required call was cut off.
        """
        done = answer.generation is not None
        reading = self.plan.read(answer.text, done=done, start=answer.start)
        calls = [(self._id(number), call) for number, call in enumerate(reading.calls)]
        content = _content(reading, answer.text) if done else reading.content
        response = ChatResponse(
            message=_message(calls, content, answer),
            delta=None,
            logprobs=answer.logprobs,
            additional_kwargs=answer.metadata,
            raw=answer.raw,
        )
        if answer.delta is not None:  # agents display the delta, so it does not contain calls
            response.delta, self._content = content.removeprefix(self._content), content
            if new := answer.reasoning.removeprefix(self._reasoning):
                response.additional_kwargs["thinking_delta"], self._reasoning = new, answer.reasoning
        if answer.generation is None:
            return response
        for call in reading.invalid:
            logger.warning("invalid tool call: %s", call.error)
        if self.plan.request.required and not reading.valid:
            reason = next((call.error for call in reading.calls), "the answer contains no call")
            raise IncompleteAnswerError(f"a required tool call is missing or incomplete: {reason}")
        return response

    def _id(self, number: int) -> str:
        while len(self._ids) <= number:
            self._ids.append(new_id())
        return self._ids[number]


def _content(reading: Reading, text: str) -> str:
    """The text outside of valid calls. It includes invalid calls."""
    return "".join([reading.content, *(text[slice(*call.offsets)] for call in reading.invalid)])


def _message(calls: list[tuple[str, Call]], content: str, answer: Answer) -> ChatMessage:
    named = [(call_id, call, call.name) for call_id, call in calls if call.error is None and call.name is not None]
    thoughts = [ThinkingBlock(content=answer.reasoning, num_tokens=answer.reasoning_tokens)] if answer.reasoning else []
    texts = [TextBlock(text=content)] if content or not calls else []
    blocks = [
        ToolCallBlock(
            tool_call_id=call_id,
            tool_name=name,
            tool_kwargs=call.written if call.arguments is None else call.arguments,
        )
        for call_id, call, name in named
    ]
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*thoughts, *texts, *blocks])
    if named:  # read by LlamaIndex's structured streams
        message.additional_kwargs["tool_calls"] = [
            {"type": "function", "id": call_id, "function": {"name": name, "arguments": call.written}}
            for call_id, call, name in named
        ]
    return message
