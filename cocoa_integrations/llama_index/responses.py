"""Spans and generations as LlamaIndex responses, with plain Python values only.

The risk is in ``additional_kwargs`` and ``raw`` of the response, never on the chat message: LlamaIndex's chat engines
put messages, with their ``additional_kwargs``, into the next prompt. Agents pass ``raw`` on, and token counters read
``usage`` from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import CompletionResponse, LogProb

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY, all_spans, risk_report, span_metadata
from cocoa_integrations._shared.reasoning import ReasoningSplitter, Split


@dataclass(frozen=True)
class Answer:
    """The content of a response, independent of its class.

    Attributes:
        text: the generated text so far.
        logprobs: one entry per token of the complete answer, or of the chunk.
        metadata: for ``additional_kwargs``: the spans of the chunk, or the risk report of the complete answer.
        raw: the same; for the complete answer also its usage, finish reason and model.
        delta: the text that this chunk adds; ``None`` if the answer was not streamed.
        generation: the complete answer; ``None`` for a chunk.
        reasoning: the reasoning so far.
        start: the offset in the text at which the answer after the reasoning begins.
        reasoning_tokens: the number of tokens of the reasoning, once the answer is complete.
    """

    text: str
    logprobs: list[list[LogProb]]
    metadata: dict[str, Any]
    raw: dict[str, Any]
    delta: str | None
    generation: Generation | None = None
    reasoning: str = ""
    start: int = 0
    reasoning_tokens: int | None = None

    def to_completion(self) -> CompletionResponse:
        """As the response to a prompt."""
        return CompletionResponse(
            text=self.text, delta=self.delta, logprobs=self.logprobs, additional_kwargs=self.metadata, raw=self.raw
        )


def complete_answer(
    generation: Generation, engine: CocoaEngine, split: Split | None = None, *, streamed: bool = False
) -> Answer:
    """The complete answer. At the end of a stream it is a further chunk that adds no text."""
    tokens = TokenLogprobs(engine)
    metadata = {RISK_KEY: risk_report(generation, split)}
    usage = {**generation.usage.model_dump(), "total_tokens": generation.usage.total_tokens}
    return Answer(
        text=generation.text,
        logprobs=[entry for span in generation.spans for entry in _log_probs(tokens, span)],
        metadata=metadata if streamed else {SPANS_KEY: all_spans(generation, split), **metadata},
        raw={
            "model": generation.model_name,
            "model_name": generation.model_name,
            "finish_reason": generation.finish_reason,
            "usage": usage,
            RISK_KEY: risk_report(generation, split),  # not shared: a change to one must not affect the other
        },
        delta="" if streamed else None,
        generation=generation,
        reasoning=split.reasoning if split is not None else "",
        start=split.answer_start if split is not None else 0,
        reasoning_tokens=split.reasoning_tokens(generation) if split is not None else None,
    )


class Chunks:
    """Converts the spans of a stream, in order, into partial answers.

    Args:
        engine: the engine that answers.
        splitter: separates the reasoning. Spans are then held back until it is known whether the answer begins with
            reasoning.
    """

    def __init__(self, engine: CocoaEngine, splitter: ReasoningSplitter | None = None) -> None:
        self._tokens = TokenLogprobs(engine)
        self._splitter = splitter
        self._text = ""
        self._spans = 0
        self._held: list[Span] = []

    def next(self, span: Span) -> list[Answer]:
        """The answers up to and including ``span``, and those held back before."""
        self._held.append(span)
        if self._splitter is not None:
            self._splitter.add(span)
            if not self._splitter.settled:
                return []
        return self._released()

    def rest(self) -> list[Answer]:
        """The answers held back at the end of the stream."""
        if self._splitter is not None:
            self._splitter.finish()
        return self._released()

    def _released(self) -> list[Answer]:
        held, self._held = self._held, []
        return [self._answer(span, is_last=span is held[-1]) for span in held]

    def _answer(self, span: Span, *, is_last: bool) -> Answer:
        self._text += span.text
        number = self._spans
        self._spans += 1
        part = self._splitter.part(span) if self._splitter is not None else None
        return Answer(
            text=self._text,
            logprobs=_log_probs(self._tokens, span),
            metadata={SPANS_KEY: [span_metadata(span, number, part)]},
            raw={SPANS_KEY: [span_metadata(span, number, part)]},
            delta=span.text,
            reasoning=self._splitter.reasoning if self._splitter is not None and is_last else "",
            start=min(self._splitter.answer_start, len(self._text)) if self._splitter is not None else 0,
        )


def _log_probs(tokens: TokenLogprobs, span: Span) -> list[list[LogProb]]:
    return [
        [LogProb(token=token["token"], logprob=token["logprob"], bytes=token["bytes"])] for token in tokens.of(span)
    ]
