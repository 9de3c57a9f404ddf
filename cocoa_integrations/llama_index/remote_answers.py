"""The answers of a server as LlamaIndex responses, with the metadata that those of ``CocoaLLM`` have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cocoa_engine.errors import IncompleteAnswerError
from cocoa_engine.logs import safe_logger
from cocoa_engine.report import RISK_KEY, SPANS_KEY, Stored
from cocoa_integrations._shared.remote_answers import (
    CHUNK,
    RESPONSE,
    entries_of,
    generation_of,
    received,
    report_of,
    span_of,
    split_of,
)
from cocoa_integrations.llama_index.callbacks import Observers
from cocoa_integrations.llama_index.responses import Delivery, log_probs_of
from cocoa_integrations.llama_index.retrieved import PassagesOfCall
from cocoa_integrations.tool_calling.json_values import object_of
from cocoa_integrations.tool_calling.prompt import invalid_call_text

logger = safe_logger(__name__)


class RemoteAnswer:
    """Converts what a server sends for one call into responses, and reports it to event handlers and collectors.

    Create it inside the call.

    Args:
        delivery: what the responses carry besides their text.
        settings: the settings that the request gives.
        passages: the retrieved nodes that the request names.
        required: whether a tool must be called.

    Attributes:
        passages: the retrieved nodes that the request names.
    """

    def __init__(
        self, delivery: Delivery, settings: Mapping[str, Any], passages: PassagesOfCall, *, required: bool
    ) -> None:
        self.passages = passages
        self._delivery, self._settings, self._required = delivery, settings, required
        self._observers = Observers()
        self._text = self._reasoning = ""
        self._calls: list[dict[str, Any]] = []  # the ids, the names and the arguments so far
        self._last: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None  # the last delta, and its chunk
        self._usage: Mapping[str, Any] = {}
        self._tokens: list[Mapping[str, Any]] = []

    def whole(self, response: Any) -> ChatResponse:
        """The response for an answer in one piece."""
        sent = received(response, RESPONSE)
        choice = sent["choices"][0]
        message = choice["message"]
        self._grow(message)
        self._tokens = _tokens(choice)
        self._usage = sent.get("usage") or {}
        wire = message.get(RISK_KEY)
        for entry in entries_of(wire["spans"]) if wire is not None else ():
            self._observers.span_decided(span_of(entry, wire["risk_source"]))
        return self._complete(message, sent, choice["finish_reason"], streamed=False)

    def add(self, chunk: Any) -> Iterator[ChatResponse]:
        """The responses that the next chunk of a stream makes. None for the last ones, see :meth:`finish`."""
        sent = received(chunk, CHUNK)
        self._usage = sent.get("usage") or self._usage
        for choice in sent["choices"][:1]:
            delta = choice.get("delta") or {}
            self._grow(delta)
            entries = entries_of(delta.get(SPANS_KEY) or ())
            for entry in entries:
                self._observers.span_decided(span_of(entry))
            tokens = _tokens(choice)
            self._tokens += tokens
            if choice.get("finish_reason") is not None:
                self._last = {**delta, "finish_reason": choice["finish_reason"]}, sent
            elif entries or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"):
                yield self._partial(delta, entries, tokens)

    def finish(self) -> Iterator[ChatResponse]:
        """The response that ends a stream. It adds no text."""
        if self._last is not None:
            delta, sent = self._last
            yield self._complete(delta, sent, delta["finish_reason"], streamed=True)

    def _grow(self, delta: Mapping[str, Any]) -> None:
        """Add the new parts of the answer."""
        self._text += delta.get("content") or ""
        self._reasoning += delta.get("reasoning_content") or ""
        for position, call in enumerate(delta.get("tool_calls") or ()):
            number = call.get("index", position)
            while len(self._calls) <= number:
                self._calls.append({"id": "", "name": "", "written": ""})
            function, grown = call.get("function") or {}, self._calls[number]
            grown["id"] = call.get("id") or grown["id"]
            grown["name"] = function.get("name") or grown["name"]
            grown["written"] += function.get("arguments") or ""

    def _partial(
        self, delta: Mapping[str, Any], entries: list[dict[str, Any]], tokens: Sequence[Mapping[str, Any]]
    ) -> ChatResponse:
        metadata = self._delivery.of_entries(entries)
        response = ChatResponse(
            message=self._message(self._text, self._calls),
            delta=delta.get("content") or "",
            logprobs=log_probs_of(tokens) if tokens else None,
            additional_kwargs=metadata,
            raw=dict(metadata),
        )
        if thought := delta.get("reasoning_content"):
            response.additional_kwargs["thinking_delta"] = thought
        return response

    def _complete(
        self, sent: Mapping[str, Any], envelope: Mapping[str, Any], finish_reason: str, *, streamed: bool
    ) -> ChatResponse:
        """The response to a complete answer, after it has been reported.

        Raises:
            IncompleteAnswerError: a required call was cut off.
        """
        content = self._text
        raw = {"model": envelope.get("model"), "model_name": envelope.get("model"), "usage": dict(self._usage)}
        metadata: dict[str, Any] = {}
        invalid: dict[str, str] = {}
        if (wire := sent.get(RISK_KEY)) is not None:
            report, own_reason = report_of(wire)
            finish_reason = own_reason or finish_reason
            calls = report.get("tool_calls", ())
            invalid = {call["id"]: call["error"] for call in calls if call["error"] is not None}
            generation = generation_of(report, own_reason, self._usage, self._settings)
            split = split_of(generation, report, self._reasoning)
            self._observers.answer_complete(generation, split, report=report, node_ids=self.passages.node_ids)
            unmade = [invalid_call_text(call["name"], call["written"]) for call in self._calls if call["id"] in invalid]
            content = "".join([self._text, *unmade])
            metadata = self._delivery.metadata(dict(report), Stored(content, self._reasoning), streamed=streamed)
            raw |= self._delivery.raw(dict(report))
        valid = [call for call in self._calls if call["id"] not in invalid]
        for error in invalid.values():
            logger.warning("invalid tool call: %s", error)
        if self._required and not valid:
            reason = next(iter(invalid.values()), "the answer contains no call")
            raise IncompleteAnswerError(f"a required tool call is missing or incomplete: {reason}")
        return ChatResponse(
            message=self._message(content, valid, done=True),
            delta="" if streamed else None,
            logprobs=log_probs_of(self._tokens) if self._tokens else None,
            additional_kwargs=metadata,
            raw={**raw, "finish_reason": finish_reason},
        )

    def _message(self, content: str, calls: Sequence[Mapping[str, Any]], *, done: bool = False) -> ChatMessage:
        details = self._usage.get("completion_tokens_details") or {}
        count = details.get("reasoning_tokens") if done else None
        thoughts = [ThinkingBlock(content=self._reasoning, num_tokens=count)] if self._reasoning else []
        texts = [TextBlock(text=content)] if content or not calls else []
        blocks = [
            ToolCallBlock(tool_call_id=call["id"], tool_name=call["name"], tool_kwargs=_kwargs(call["written"]))
            for call in calls
        ]
        message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*thoughts, *texts, *blocks])
        if calls:  # read by LlamaIndex's structured streams
            message.additional_kwargs["tool_calls"] = [
                {
                    "type": "function",
                    "id": call["id"],
                    "function": {"name": call["name"], "arguments": call["written"]},
                }
                for call in calls
            ]
        return message


def _kwargs(written: str) -> dict[str, Any] | str:
    arguments = object_of(written)
    return written if arguments is None else arguments


def _tokens(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((choice.get("logprobs") or {}).get("content") or ())
