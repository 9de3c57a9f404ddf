"""LlamaIndex chat messages as the plain dicts that a chat template takes, and answers as LlamaIndex responses.

The risk is in ``additional_kwargs`` and ``raw`` of a response, never on the chat message: LlamaIndex's chat engines put
messages, with their ``additional_kwargs``, into the next prompt. Agents keep ``raw``, and only it, so its report is
compact; token counters read ``usage`` from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cocoa_engine import PromptError
from cocoa_engine.errors import IncompleteAnswerError
from cocoa_engine.logs import safe_logger
from cocoa_engine.model.text import require_unicode
from cocoa_engine.report import RISK_KEY, SPANS_KEY, Detail, RiskReport
from cocoa_integrations.chat_service import Answer, Piece
from cocoa_integrations.tool_calling import invalid_call_text, object_of

logger = safe_logger(__name__)

Response = TypeVar("Response", CompletionResponse, ChatResponse)

_TEMPLATE_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def require_text(messages: Sequence[ChatMessage]) -> None:
    """Refuse messages that contain something besides text, tool calls and reasoning, or nothing at all."""
    for number, message in enumerate(messages):
        require_unicode(message.content or "", f"content of message {number} ({message.role.value})")
        readable = (TextBlock, CachePoint, *((ThinkingBlock, ToolCallBlock) if _role(message) == "assistant" else ()))
        for block in message.blocks:
            if not isinstance(block, readable):
                kind = type(block).__name__
                raise PromptError(f"this model reads text only, but a {message.role.value} message has a {kind}.")
    if not any((message.content or "").strip() or _calls(message) for message in messages):
        raise PromptError("the conversation is empty; give at least one message with text.")


def edited(messages: Sequence[ChatMessage], edit: Callable[[str], str]) -> list[ChatMessage]:
    """Copies of the messages with ``edit`` applied to each of their texts, in order."""

    def changed(block: Any) -> Any:
        return block.model_copy(update={"text": edit(block.text)}) if isinstance(block, TextBlock) else block

    return [message.model_copy(update={"blocks": [*map(changed, message.blocks)]}) for message in messages]


def to_entries(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages. Only the ``additional_kwargs`` of tool results reach the prompt.

    Returns:
        ``{"role": ..., "content": ...}`` per message, with ``"tool_calls"`` (OpenAI's format, the arguments a dict) for
        an assistant that called tools, with ``"reasoning_content"`` for an assistant that reasoned, and with
        ``"tool_call_id"`` and ``"name"`` for the result of a tool.
    """
    converted: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # names of the tools by the ids of their calls
    for message in messages:
        role = _role(message)
        invalid = [
            invalid_call_text(block.tool_name, str(block.tool_kwargs))
            for block in message.blocks
            if isinstance(block, ToolCallBlock) and arguments_of(block) is None
        ]
        entry: dict[str, Any] = {"role": role, "content": "\n".join(filter(None, [message.content, *invalid]))}
        if calls := _calls(message):
            entry["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        thoughts = [block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock)]
        if reasoning := "".join(thoughts):
            entry["reasoning_content"] = reasoning
        if role == "tool":
            call_id = str(message.additional_kwargs.get("tool_call_id", ""))
            entry |= {"tool_call_id": call_id, "name": message.additional_kwargs.get("name", names.get(call_id, ""))}
        converted.append(entry)
    return converted


def _role(message: ChatMessage) -> str:
    """The role of a message in chat templates."""
    return _TEMPLATE_ROLES.get(message.role, message.role.value)


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    """The tool calls of a message in OpenAI's format, the arguments a dict."""
    return [
        {
            "type": "function",
            "id": block.tool_call_id or "",
            "function": {"name": block.tool_name, "arguments": arguments},
        }
        for block in message.blocks
        if isinstance(block, ToolCallBlock) and (arguments := arguments_of(block)) is not None
    ]


def arguments_of(block: ToolCallBlock) -> dict[str, Any] | None:
    """The arguments of a call; ``None`` if they are not a complete JSON object."""
    return block.tool_kwargs if isinstance(block.tool_kwargs, dict) else object_of(block.tool_kwargs)


def detail_of(detail: Detail | None, streamed: bool) -> Detail:
    """How much of the risk the ``additional_kwargs`` of responses carry."""
    return detail or ("full" if streamed else "compact")


def _risk(report: RiskReport | None, detail: Detail, text: str | None = None, reasoning: str = "") -> dict[str, Any]:
    if report is None or detail == "none":
        return {}
    return {RISK_KEY: (report if detail == "full" else report.compact(text, reasoning)).to_dict()}


class Writer(ABC, Generic[Response]):
    """Makes the responses of one call, in the detail of :func:`detail_of`, and compact in the ``raw`` by default."""

    def __init__(self, detail: Detail | None, *, streamed: bool) -> None:
        self._in_raw: Detail = detail or "compact"
        self._detail, self._streamed = detail_of(detail, streamed), streamed
        self._text = ""  # so far

    @abstractmethod
    def partial(self, piece: Piece) -> Response:
        """The response for a piece of a stream."""

    @abstractmethod
    def complete(self, answer: Answer) -> Response:
        """The response for a complete answer. At the end of a stream it is a further chunk."""

    def _fields(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.logprobs is None else log_probs_of(piece.logprobs)
        of_span = piece.entry if self._detail == "full" else None  # a compact stream has its report in the last chunk
        metadata, raw = ({} if of_span is None else {SPANS_KEY: [of_span.to_dict()]} for _ in range(2))
        return {"additional_kwargs": metadata, "raw": raw, "logprobs": logprobs}

    def _final(self, answer: Answer, text: str) -> dict[str, Any]:
        report = answer.report
        metadata = _risk(report, self._detail, text, answer.reasoning)
        if report is not None and self._detail == "full" and not self._streamed:
            metadata = {SPANS_KEY: [span.to_dict() for span in report.spans], **metadata}
        return {
            "additional_kwargs": metadata,
            "raw": {
                "model": answer.model_name,
                "model_name": answer.model_name,
                "finish_reason": answer.finish_reason,
                "usage": {**answer.usage.model_dump(), "total_tokens": answer.usage.total_tokens},
                **_risk(report, self._in_raw),  # agents keep it without the text, so its spans have their texts
            },
            "logprobs": None if answer.logprobs is None else log_probs_of(answer.logprobs),
            "delta": text.removeprefix(self._text) if self._streamed else None,
        }


class CompletionWriter(Writer[CompletionResponse]):
    """Makes the responses to a prompt. They have all of the text."""

    def partial(self, piece: Piece) -> CompletionResponse:
        """The response for a piece of a stream."""
        text = piece.content if piece.entry is None else piece.entry.text or ""
        self._text += text
        return CompletionResponse(text=self._text, delta=text, **self._fields(piece))

    def complete(self, answer: Answer) -> CompletionResponse:
        """The response for a complete answer."""
        return CompletionResponse(text=answer.text, **self._final(answer, answer.text))


class ChatWriter(Writer[ChatResponse]):
    """Makes the responses to chat messages, with reasoning and tool calls apart from the text."""

    def __init__(self, detail: Detail | None, *, streamed: bool, required: bool) -> None:
        super().__init__(detail, streamed=streamed)
        self._required = required
        self._reasoning = ""
        self._calls: list[tuple[str, str, str]] = []  # the id, the name and the arguments so far

    def partial(self, piece: Piece) -> ChatResponse:
        """The response for a piece of a stream."""
        self._text += piece.content
        self._reasoning += piece.reasoning
        for delta in piece.calls:
            while len(self._calls) <= delta.number:
                self._calls.append((delta.id or "", delta.name or "", ""))
            call_id, name, written = self._calls[delta.number]
            self._calls[delta.number] = call_id, name, written + delta.written
        message = _message(self._text, self._reasoning, None, [call for call in self._calls if call[1]])
        # agents display the delta, so it does not contain calls
        response = ChatResponse(message=message, delta=piece.content, **self._fields(piece))
        if piece.reasoning:
            response.additional_kwargs["thinking_delta"] = piece.reasoning
        return response

    def complete(self, answer: Answer) -> ChatResponse:
        """The response for a complete answer; see :meth:`Writer.complete`. Invalid calls are part of its text."""
        for call in answer.invalid_calls:
            logger.warning("invalid tool call: %s", call.error)
        if self._required and not answer.valid_calls:
            reason = next((call.error for call in answer.calls), "the answer contains no call")
            raise IncompleteAnswerError(f"a required tool call is missing or incomplete: {reason}")
        text = "".join([answer.content, *(call.text for call in answer.invalid_calls)])
        calls = [(call.id, call.name or "", call.written) for call in answer.valid_calls]
        message = _message(text, answer.reasoning, answer.reasoning_tokens, calls)
        response = ChatResponse(message=message, **self._final(answer, text))
        if self._streamed and answer.rest.reasoning:
            response.additional_kwargs["thinking_delta"] = answer.rest.reasoning
        return response


def _message(
    text: str, reasoning: str, reasoning_tokens: int | None, calls: Sequence[tuple[str, str, str]]
) -> ChatMessage:
    thoughts = [ThinkingBlock(content=reasoning, num_tokens=reasoning_tokens)] if reasoning else []
    texts = [TextBlock(text=text)] if text or not calls else []
    blocks = []
    for call_id, name, written in calls:
        arguments = object_of(written)
        kwargs = written if arguments is None else arguments
        blocks.append(ToolCallBlock(tool_call_id=call_id, tool_name=name, tool_kwargs=kwargs))
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*thoughts, *texts, *blocks])
    if calls:  # read by LlamaIndex's structured streams
        message.additional_kwargs["tool_calls"] = [
            {"type": "function", "id": call_id, "function": {"name": name, "arguments": written}}
            for call_id, name, written in calls
        ]
    return message


def log_probs_of(tokens: Iterable[Mapping[str, Any]]) -> list[list[LogProb]]:
    """The entries of tokens, from those in the format of OpenAI's ``logprobs``: with ``top_logprobs`` the most probable
    tokens, as LlamaIndex's OpenAI LLM gives them, and the token itself if it is not among them; otherwise it alone.
    """
    log_probs = []
    for token in tokens:
        entries = token["top_logprobs"]
        if all((each["token"], each["logprob"]) != (token["token"], token["logprob"]) for each in entries):
            entries = [*entries, token]
        log_probs.append(
            [LogProb(token=each["token"], logprob=each["logprob"], bytes=each["bytes"] or []) for each in entries]
        )
    return log_probs
