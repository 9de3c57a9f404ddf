"""LangChain messages as the plain dicts that a chat template takes, and answers as LangChain messages."""

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
from langchain_core.utils.json import parse_partial_json

from cocoa_engine.errors import PromptError
from cocoa_engine.integration import block_text
from cocoa_engine.report import RISK_KEY, SPANS_KEY
from cocoa_integrations._shared.options import entry_of, require_text
from cocoa_integrations.chat_service import Answer, Piece
from cocoa_integrations.reports import reasoning_of
from cocoa_integrations.tool_calling import invalid_call_text

CALL_BLOCKS = frozenset({"tool_use", "function_call", "tool_call", "tool_call_chunk", "invalid_tool_call"})
"""Content blocks of an assistant message that repeat its ``tool_calls``."""

REASONING_BLOCKS = frozenset({"reasoning", "thinking", "redacted_thinking", "non_standard"})
"""Content blocks of an assistant message that are not part of its answer: reasoning, of LangChain and of Anthropic, and
what LangChain knows no type for."""


ROLES = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant", ToolMessage: "tool"}


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert a conversation.

    Raises:
        PromptError: the messages have no text, or a message has an unsupported type or content, or a lone surrogate.
    """
    chat = to_entries(messages)
    require_text(chat)
    return chat


def to_entries(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages, which may be empty; see :func:`to_chat`."""
    called = {call["id"]: call["name"] for turn in messages if isinstance(turn, AIMessage) for call in turn.tool_calls}
    chat = []
    for message in messages:
        options: dict[str, Any] = {"name": message.name}
        texts = [_text(message)]
        if isinstance(message, ToolMessage):
            options = {"name": message.name or called.get(message.tool_call_id), "answers": message.tool_call_id}
        elif isinstance(message, AIMessage):
            options["calls"] = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
            options["reasoning"] = reasoning_of(message)
            # an invalid call is part of the text
            texts += [invalid_call_text(call["name"], call["args"] or "") for call in message.invalid_tool_calls]
        chat.append(entry_of(_role(message), texts, **options))
    return chat


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if role := next((role for kind, role in ROLES.items() if isinstance(message, kind)), None):
        return role
    raise PromptError(
        f"a chat prompt cannot hold messages of type {type(message).__name__}; "
        "known are SystemMessage, HumanMessage, AIMessage, ToolMessage and ChatMessage"
    )


def _text(message: BaseMessage) -> str:
    """The text of a message: its content, or the concatenation of its text blocks."""
    if isinstance(message.content, str):
        return message.content
    calls = [*message.tool_calls, *message.invalid_tool_calls] if isinstance(message, AIMessage) else []
    ids = {call["id"] for call in calls}
    parts = []
    for block in message.content:
        kind = None if isinstance(block, str) or not isinstance(message, AIMessage) else block.get("type")
        if isinstance(block, str):
            parts.append(block)
        elif kind in CALL_BLOCKS:
            if not {block.get("id"), block.get("call_id")} & ids:
                raise PromptError(f"content of type {kind!r} in AIMessage is not in its tool_calls; add it there")
        elif kind not in REASONING_BLOCKS:
            parts.append(block_text(block, type(message).__name__))
    return "".join(parts)


def message_content(reasoning: str, text: str) -> str | list[str | dict[str, Any]]:
    """The content of an answer: its text, or blocks of reasoning and text."""
    if not reasoning:
        return text
    return [{"type": "reasoning", "reasoning": reasoning}, *([{"type": "text", "text": text}] if text else [])]


def answer_message(answer: Answer) -> AIMessage:
    """The message of a whole answer."""
    calls = [tool_call(name=call.name or "", args=call.arguments or {}, id=call.id) for call in answer.valid_calls]
    invalid = [
        invalid_tool_call(name=call.name, args=call.written, id=call.id, error=call.error)
        for call in answer.invalid_calls
    ]
    return AIMessage(
        content=message_content(answer.reasoning, answer.content),
        tool_calls=calls,
        invalid_tool_calls=invalid,
        additional_kwargs={SPANS_KEY: [span.to_dict() for span in answer.spans]},
        response_metadata={**answer_metadata(answer), "model_provider": "cocoa"},
        usage_metadata=usage_metadata(answer),
    )


def answer_metadata(answer: Answer) -> dict[str, Any]:
    """The full metadata of a whole answer. In a stream, only one chunk may carry it."""
    tokens = {} if answer.logprobs is None else {"logprobs": {"content": answer.logprobs}}
    risk = {} if answer.report is None else {RISK_KEY: answer.report.to_dict()}
    return {**risk, "model_name": answer.model_name, "finish_reason": answer.finish_reason, **tokens}


def usage_metadata(answer: Answer) -> UsageMetadata:
    """Token counts under LangChain's names, with those of the reasoning if the model reasoned."""
    usage = answer.usage
    counts = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
    if answer.reasoning_tokens is not None:
        counts["output_token_details"] = {"reasoning": answer.reasoning_tokens}
    return counts


class Writer:
    """Makes the chunks of one streamed answer: of a text model, or messages.

    The content of a message is a list of blocks from the first reasoning on.
    """

    def __init__(self, *, is_chat: bool, blocks: bool, usage: bool) -> None:
        self._is_chat, self._blocks, self._usage = is_chat, blocks, usage
        self._written: dict[int, str] = {}  # the arguments of each call

    def chunk(self, piece: Piece, **last: Any) -> GenerationChunk | ChatGenerationChunk:
        """The chunk of a piece."""
        spans = {} if piece.entry is None else {SPANS_KEY: [piece.entry.to_dict()]}
        if not self._is_chat:
            return GenerationChunk(text=piece.content, generation_info={SPANS_KEY: [], **spans})
        self._blocks = self._blocks or bool(piece.reasoning)
        # LangChain adds blocks by their index; with output_version="v1" the parts of tool calls have numbers
        parts = (("reasoning", piece.reasoning, "lc_rsn_0"), ("text", piece.content, "lc_txt_0"))
        blocks: Any = [{"type": kind, kind: text, "index": index} for kind, text, index in parts if text]
        calls = []
        for delta in piece.calls:
            written = self._written[delta.number] = self._written.get(delta.number, "") + delta.written
            args = delta.written + ("" if delta.error is None else invalid_ending(written))
            calls.append(tool_call_chunk(name=delta.name, args=args, id=delta.id, index=delta.number))
        content = blocks if self._blocks else piece.content
        message = AIMessageChunk(content=content, tool_call_chunks=calls, additional_kwargs=spans, **last)
        return ChatGenerationChunk(message=message)

    def last(self, answer: Answer) -> GenerationChunk | ChatGenerationChunk:
        """The chunk that ends the answer, with its report."""
        usage = {"usage_metadata": usage_metadata(answer)} if self._usage else {}
        if not self._is_chat:
            return GenerationChunk(text="", generation_info={**answer_metadata(answer), **usage})
        metadata = {**answer_metadata(answer), "model_provider": "cocoa"}
        return self.chunk(answer.rest, response_metadata=metadata, chunk_position="last", **usage)


def invalid_ending(written: str) -> str:
    """An ending, such as an unmatched bracket, of truncated arguments that LangChain would otherwise complete."""

    def is_completed(args: str) -> bool:
        try:
            return not args or isinstance(parse_partial_json(args), dict)
        except ValueError:
            return False

    endings = ("", "]", "}", '"]', '"}', '""]', '""}')
    return next((ending for ending in endings if not is_completed(written + ending)), "")
