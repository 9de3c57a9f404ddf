"""The answers of a server as LangChain messages and chunks, with the metadata that those of ``ChatCocoa`` have."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY
from cocoa_integrations._shared.remote_answers import clear_errors, entries_of, generation_of, report_of, split_of
from cocoa_integrations.langchain.messages import chunk_content, message_content, reasoning_of
from cocoa_integrations.langchain.tools import invalid_ending
from cocoa_integrations.tracing import RiskTrace

DELTA = "cocoa_delta"
"""Where a chunk holds the ``delta`` of the server until it is complete."""


def complete_message(message: BaseMessage, choice: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    """Add to a message of OpenAI's class what that class drops.

    Args:
        message: the message, which is changed.
        choice: its choice in the response.
        response: the response.
    """
    sent = choice["message"]
    if not isinstance(message, AIMessage):
        return
    message.content = message_content(sent.get("reasoning_content") or "", str(message.content))
    if (wire := sent.get(RISK_KEY)) is None:
        return
    report, finish_reason = report_of(wire)
    _mark_invalid(message, sent, report)
    message.additional_kwargs[SPANS_KEY] = [dict(span) for span in report["spans"]]
    message.response_metadata |= _metadata(report, finish_reason, response.get("model"))


def recorded(result: ChatResult, trace: RiskTrace) -> ChatResult:
    """The result, after the risk of its answers was written to the span of the call."""
    for generation in result.generations:
        _record(trace, generation.message, generation.message.response_metadata.get(RISK_KEY))
    return result


class StreamedAnswer:
    """Completes the chunks of one stream. As in a stream of ``ChatCocoa``, the last chunk has the report and the usage.

    Args:
        trace: where the risk of the answer is written to.
        blocks: whether the content of chunks is a list of blocks, calls included. Otherwise it is one without calls,
            from the first reasoning on.
    """

    def __init__(self, trace: RiskTrace, *, blocks: bool) -> None:
        self._trace = trace
        self._blocks = self._lists_calls = blocks
        self._written: dict[int, str] = {}  # the arguments of the calls
        self._numbers: dict[str, int] = {}  # of the calls, by their ids
        self._last: ChatGenerationChunk | None = None

    def of(self, chunks: Iterable[ChatGenerationChunk]) -> Iterator[ChatGenerationChunk]:
        """The chunks of a whole stream."""
        with clear_errors():
            for chunk in chunks:
                yield from self._add(chunk)
        yield from self._finish()

    async def aof(self, chunks: AsyncIterable[ChatGenerationChunk]) -> AsyncIterator[ChatGenerationChunk]:
        """See :meth:`of`."""
        with clear_errors():
            async for chunk in chunks:
                for made in self._add(chunk):
                    yield made
        for made in self._finish():
            yield made

    def _add(self, chunk: ChatGenerationChunk) -> list[ChatGenerationChunk]:
        """The chunks that the next one of the server completes."""
        message = chunk.message
        delta: Mapping[str, Any] = message.additional_kwargs.pop(DELTA, {})
        assert isinstance(message, AIMessageChunk)
        reasoning = delta.get("reasoning_content") or ""
        self._blocks = self._blocks or bool(reasoning)
        for call in message.tool_call_chunks:
            number = call["index"] or 0
            self._written[number] = self._written.get(number, "") + (call["args"] or "")
            self._numbers.setdefault(call["id"] or "", number)
        if self._blocks:
            calls = message.tool_call_chunks if self._lists_calls else ()
            message.content = [*chunk_content(reasoning, str(message.content)), *map(dict, calls)]
        if entries := delta.get(SPANS_KEY):
            message.additional_kwargs[SPANS_KEY] = entries_of(entries)
        if "model_provider" in message.response_metadata:
            message.response_metadata["model_provider"] = "cocoa"
        info = chunk.generation_info or {}
        if (wire := delta.get(RISK_KEY)) is not None:
            report, finish_reason = report_of(wire)
            message.tool_call_chunks += self._endings(report)
            message.response_metadata |= _metadata(report, finish_reason, info.get("model_name"))
            _record(self._trace, message, report)
        made = ChatGenerationChunk(message=message, generation_info=chunk.generation_info)
        if self._last is not None or "finish_reason" in info:
            self._last = made if self._last is None else self._last + made
            return []
        # the first one only says that an assistant answers
        return [made] if message.content or message.tool_call_chunks or message.additional_kwargs or info else []

    def _finish(self) -> list[ChatGenerationChunk]:
        """The chunk that ends the stream."""
        if self._last is None:
            return []
        message = self._last.message.model_copy(update={"chunk_position": "last"})
        return [ChatGenerationChunk(message=message, generation_info=self._last.generation_info)]

    def _endings(self, report: Mapping[str, Any]) -> list[Any]:
        """What makes the arguments of invalid calls invalid for LangChain, which would otherwise complete them."""
        return [
            tool_call_chunk(name=None, args=invalid_ending(self._written[number]), id=None, index=number)
            for call in report.get("tool_calls", ())
            if call["error"] is not None and (number := self._numbers.get(call["id"])) is not None
        ]


def _metadata(report: dict[str, Any], finish_reason: str | None, model_name: str | None) -> dict[str, Any]:
    return {RISK_KEY: report, "model_name": model_name, "finish_reason": finish_reason, "model_provider": "cocoa"}


def _mark_invalid(message: AIMessage, sent: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """List the calls that the server could not parse as invalid, with its reason.

    LangChain takes a call that was cut off before its arguments for one without arguments.
    """
    errors = {call["id"]: call["error"] for call in report.get("tool_calls", ()) if call["error"] is not None}
    message.tool_calls = [call for call in message.tool_calls if call["id"] not in errors]
    message.invalid_tool_calls = [
        *(call for call in message.invalid_tool_calls if call["id"] not in errors),
        *(
            invalid_tool_call(
                name=call["function"]["name"],
                args=call["function"]["arguments"],
                id=call["id"],
                error=errors[call["id"]],
            )
            for call in sent.get("tool_calls") or ()
            if call["id"] in errors
        ),
    ]


def _record(trace: RiskTrace, message: BaseMessage, report: Mapping[str, Any] | None) -> None:
    if report is not None and trace.is_recording:
        generation = generation_of(report, None)
        trace.record(split_of(generation, report, reasoning_of(message)).answered)
