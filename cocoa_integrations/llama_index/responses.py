"""Spans and generations as LlamaIndex responses: plain Python values only, no tensors.

The risk sits in the response's ``additional_kwargs`` and ``raw``, never on the chat message: LlamaIndex's chat
engines put messages back into the next prompt, their ``additional_kwargs`` included. ``raw`` is what agents pass on
and where token counters look for ``usage``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_integrations.logprobs import TokenLogprobs
from cocoa_integrations.metadata import RISK_KEY, SPANS_KEY, all_spans, risk_report, span_metadata


@dataclass(frozen=True)
class Answer:
    """What a response says, whichever class it is.

    Attributes:
        text: the answer so far.
        logprobs: of a whole answer's tokens, or of the chunk's; one entry per token.
        metadata: for ``additional_kwargs``: the chunk's spans, or the whole answer's risk report.
        raw: the same, and with the whole answer its usage, finish reason and model.
        delta: what this chunk adds to the text; none if the answer was not streamed.
        generation: the whole answer, if this is it.
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


def whole_answer(generation: Generation, engine: CocoaEngine, *, streamed: bool = False) -> Answer:
    """The complete answer; at the end of a stream it comes as one more chunk that adds no text."""
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
            RISK_KEY: risk_report(generation),  # its own, as whoever changes one does not mean the other
        },
        delta="" if streamed else None,
        generation=generation,
    )


class Chunks:
    """Turns the spans of a stream, in order, into answers so far."""

    def __init__(self, engine: CocoaEngine) -> None:
        self._tokens = TokenLogprobs(engine)
        self._text = ""
        self._spans = 0

    def next(self, span: Span) -> Answer:
        """The answer up to and with ``span``."""
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
