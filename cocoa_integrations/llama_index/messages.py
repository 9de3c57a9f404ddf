"""LlamaIndex chat messages as the plain dicts that a chat template takes, and answers as LlamaIndex responses.

The risk is in ``additional_kwargs`` and ``raw`` of a response, never on the chat message: LlamaIndex's chat engines put
messages, with their ``additional_kwargs``, into the next prompt. Agents keep ``raw``, and only it, so its report is
compact; token counters read ``usage`` from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from cocoa_engine.integration import safe_logger
from cocoa_engine.report import RISK_KEY, SPANS_KEY, Detail, RiskReport
from cocoa_integrations._shared.options import entry_of
from cocoa_integrations.chat_service import Answer, Piece
from cocoa_integrations.tool_calling import invalid_call_text, object_of

logger = safe_logger(__name__)

_TEMPLATE_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def to_entries(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages. Only the ``additional_kwargs`` of tool results reach the prompt.

    Raises:
        PromptError: a message contains something besides text, or in an assistant's message tool calls and reasoning.
    """
    chat: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools by the ids of their calls
    for message in messages:
        role, options = _TEMPLATE_ROLES.get(message.role, message.role.value), dict[str, Any]()
        calls, thoughts, texts = list[tuple[str, str, Any]](), "", [message.content]
        for block in message.blocks:
            if isinstance(block, ToolCallBlock) and role == "assistant":
                if (arguments := arguments_of(block)) is None:
                    texts.append(invalid_call_text(block.tool_name, str(block.tool_kwargs)))
                else:
                    calls.append((block.tool_call_id or "", block.tool_name, arguments))
            elif isinstance(block, ThinkingBlock) and role == "assistant":
                thoughts += block.content or ""
            elif not isinstance(block, (TextBlock, CachePoint)):
                kind = type(block).__name__
                raise PromptError(f"this model reads text only, but a {message.role.value} message has a {kind}.")
        names |= {call_id: name for call_id, name, _ in calls}
        if role == "tool":
            call_id = str(message.additional_kwargs.get("tool_call_id", ""))
            options = {"answers": call_id, "name": message.additional_kwargs.get("name", names.get(call_id))}
        chat.append(entry_of(role, texts, calls=calls, reasoning=thoughts, **options))
    return chat


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


class Writer:
    """Makes the responses of one call, in the detail of :func:`detail_of`, and compact in the ``raw`` by default.

    Responses to a prompt have all of the text. Those to chat messages have reasoning and tool calls apart from it.
    """

    def __init__(self, detail: Detail | None, *, streamed: bool, is_chat: bool, required: bool = False) -> None:
        self._in_raw: Detail = detail or "compact"
        self._detail, self._streamed = detail_of(detail, streamed), streamed
        self._is_chat, self._required = is_chat, required
        self._text = self._reasoning = ""  # so far
        self._calls: list[tuple[str, str, str]] = []  # the id, the name and the arguments so far

    def partial(self, piece: Piece) -> Any:
        """The response for a piece of a stream."""
        self._text += piece.content
        self._reasoning += piece.reasoning
        for delta in piece.calls:
            while len(self._calls) <= delta.number:
                self._calls.append((delta.id or "", delta.name or "", ""))
            call_id, name, written = self._calls[delta.number]
            self._calls[delta.number] = call_id, name, written + delta.written
        # a compact stream has its report in the last chunk
        spans = [] if piece.entry is None or self._detail != "full" else [piece.entry.to_dict()]
        raw: dict[str, Any] = {SPANS_KEY: spans} if spans else {}
        metadata = dict(raw)
        logprobs = None if piece.logprobs is None else log_probs_of(piece.logprobs)
        # agents display the delta, so it does not contain calls
        fields = {"additional_kwargs": metadata, "raw": raw, "logprobs": logprobs, "delta": piece.content}
        if not self._is_chat:
            return CompletionResponse(text=self._text, **fields)
        if piece.reasoning:
            metadata["thinking_delta"] = piece.reasoning
        message = _message(self._text, self._reasoning, None, [call for call in self._calls if call[1]])
        return ChatResponse(message=message, **fields)

    def complete(self, answer: Answer) -> Any:
        """The response for a complete answer. At the end of a stream it is a further chunk.

        Invalid calls are part of the text of a chat message.
        """
        for call in answer.invalid_calls:
            logger.warning("invalid tool call: %s", call.error)
        if self._required and not answer.valid_calls:
            reason = next((call.error for call in answer.calls), "the answer contains no call")
            raise IncompleteAnswerError(f"a required tool call is missing or incomplete: {reason}")
        text = (
            "".join([answer.content, *(call.text for call in answer.invalid_calls)]) if self._is_chat else answer.text
        )
        metadata = _risk(answer.report, self._detail, text, answer.reasoning)
        if answer.report is not None and self._detail == "full" and not self._streamed:
            metadata = {SPANS_KEY: [span.to_dict() for span in answer.spans], **metadata}
        if self._streamed and answer.rest.reasoning:
            metadata["thinking_delta"] = answer.rest.reasoning
        fields: dict[str, Any] = {
            "additional_kwargs": metadata,
            "raw": {
                "model": answer.model_name,
                "model_name": answer.model_name,
                "finish_reason": answer.finish_reason,
                "usage": {**answer.usage.model_dump(), "total_tokens": answer.usage.total_tokens},
                **_risk(answer.report, self._in_raw),  # agents keep it without the text: its spans have their texts
            },
            "logprobs": None if answer.logprobs is None else log_probs_of(answer.logprobs),
            "delta": text.removeprefix(self._text) if self._streamed else None,
        }
        if not self._is_chat:
            return CompletionResponse(text=text, **fields)
        calls = [(call.id, call.name or "", call.written) for call in answer.valid_calls]
        return ChatResponse(message=_message(text, answer.reasoning, answer.reasoning_tokens, calls), **fields)


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
        if all((entry["token"], entry["logprob"]) != (token["token"], token["logprob"]) for entry in entries):
            entries = [*entries, token]
        log_probs.append(
            [LogProb(token=entry["token"], logprob=entry["logprob"], bytes=entry["bytes"] or []) for entry in entries]
        )
    return log_probs
