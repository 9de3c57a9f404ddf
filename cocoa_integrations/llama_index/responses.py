"""Spans and generations as LlamaIndex responses, with plain Python values only.

The risk is in ``additional_kwargs`` and ``raw`` of the response, never on the chat message: LlamaIndex's chat engines
put messages, with their ``additional_kwargs``, into the next prompt. Agents pass ``raw`` on, and token counters read
``usage`` from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY, all_spans, risk_report, span_metadata


@dataclass(frozen=True)
class Answer:
    """The content of a response, independent of its class.

    Attributes:
        text: the answer so far.
        logprobs: one entry per token of the complete answer, or of the chunk.
        metadata: for ``additional_kwargs``: the spans of the chunk, or the risk report of the complete answer.
        raw: the same; for the complete answer also its usage, finish reason and model.
        delta: the text that this chunk adds; ``None`` if the answer was not streamed.
        generation: the complete answer; ``None`` for a chunk.
    """

    text: str
    logprobs: list[list[LogProb]]
    metadata: dict[str, Any]
    raw: dict[str, Any]
    delta: str | None
    generation: Generation | None = None

    def to_completion(self) -> CompletionResponse:
        """As the response to a prompt."""
        return CompletionResponse(
            text=self.text, delta=self.delta, logprobs=self.logprobs, additional_kwargs=self.metadata, raw=self.raw
        )

    def to_chat(self) -> ChatResponse:
        """As the response to chat messages."""
        return ChatResponse(
            message=ChatMessage(role=MessageRole.ASSISTANT, content=self.text),
            delta=self.delta,
            logprobs=self.logprobs,
            additional_kwargs=self.metadata,
            raw=self.raw,
        )


def complete_answer(generation: Generation, engine: CocoaEngine, *, streamed: bool = False) -> Answer:
    """The complete answer. At the end of a stream it is a further chunk that adds no text."""
    tokens = TokenLogprobs(engine)
    metadata = {RISK_KEY: risk_report(generation)}
    usage = {**generation.usage.model_dump(), "total_tokens": generation.usage.total_tokens}
    return Answer(
        text=generation.text,
        logprobs=[entry for span in generation.spans for entry in _log_probs(tokens, span)],
        metadata=metadata if streamed else {SPANS_KEY: all_spans(generation), **metadata},
        raw={
            "model": generation.model_name,
            "model_name": generation.model_name,
            "finish_reason": generation.finish_reason,
            "usage": usage,
            RISK_KEY: risk_report(generation),  # not shared with metadata: a change to one must not affect the other
        },
        delta="" if streamed else None,
        generation=generation,
    )


class Chunks:
    """Converts the spans of a stream, in order, into partial answers."""

    def __init__(self, engine: CocoaEngine) -> None:
        self._tokens = TokenLogprobs(engine)
        self._text = ""
        self._spans = 0

    def next(self, span: Span) -> Answer:
        """The answer up to and including ``span``."""
        self._text += span.text
        number = self._spans
        self._spans += 1
        return Answer(
            text=self._text,
            logprobs=_log_probs(self._tokens, span),
            metadata={SPANS_KEY: [span_metadata(span, number)]},
            raw={SPANS_KEY: [span_metadata(span, number)]},
            delta=span.text,
        )


def _log_probs(tokens: TokenLogprobs, span: Span) -> list[list[LogProb]]:
    return [
        [LogProb(token=token["token"], logprob=token["logprob"], bytes=token["bytes"])] for token in tokens.of(span)
    ]
