"""Spans and generations as LlamaIndex responses, with plain Python values only.

The risk is in ``additional_kwargs`` and ``raw`` of the response, never on the chat message: LlamaIndex's chat engines
put messages, with their ``additional_kwargs``, into the next prompt. Agents keep ``raw``, and only it, so its report is
compact; token counters read ``usage`` from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, LogProb

from cocoa_engine import CocoaEngine, Generation, Span
from cocoa_engine.report import Part
from cocoa_integrations._shared.detail import Detail, Stored, compact_report, require_detail
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY, risk_report, span_metadata
from cocoa_integrations._shared.reasoning import ReasoningSplitter, Split
from cocoa_integrations.llama_index.retrieved import PassagesOfCall

Response = TypeVar("Response", CompletionResponse, ChatResponse)


@dataclass(frozen=True)
class Delivery:
    """What the responses of one call carry besides their text.

    Attributes:
        detail: how much of the risk; ``None``: full in streams, otherwise compact, and compact in the ``raw`` of every
            complete answer.
        logprobs: whether they carry log-probabilities; ``None``: where the risk is full.

    Raises:
        ConfigError: the detail is unknown.
    """

    detail: Detail | None = None
    logprobs: bool | None = None

    def __post_init__(self) -> None:
        require_detail(self.detail)

    def metadata(self, report: dict[str, Any], stored: Stored, *, streamed: bool) -> dict[str, Any]:
        """The ``additional_kwargs`` of a complete answer with this full report; ``stored`` is what the response has."""
        detail = self._of(streamed)
        if detail == "full" and not streamed:
            return {SPANS_KEY: [dict(span) for span in report["spans"]], RISK_KEY: report}
        return _risk(report, stored, detail)

    def raw(self, report: dict[str, Any]) -> dict[str, Any]:
        """The part of ``raw`` that has the risk. Agents keep it without the text, so spans have their texts."""
        return _risk(report, None, self.detail or "compact")

    def of_span(self, span: Span, number: int, part: Part | None) -> dict[str, Any]:
        """The metadata of the chunk of a span. A compact stream has its report in the last chunk only."""
        return self.of_entries([span_metadata(span, number, part)])

    def of_entries(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The metadata of a chunk with these entries of ``cocoa_spans``."""
        return {SPANS_KEY: entries} if entries and self._of(True) == "full" else {}

    def has_logprobs(self, *, streamed: bool) -> bool:
        """Whether a response carries log-probabilities."""
        return self._of(streamed) == "full" if self.logprobs is None else self.logprobs

    def _of(self, streamed: bool) -> Detail:
        return self.detail or ("full" if streamed else "compact")


def _risk(report: dict[str, Any], stored: Stored | None, detail: Detail) -> dict[str, Any]:
    if detail == "none":
        return {}
    return {RISK_KEY: report if detail == "full" else compact_report(report, stored)}


@dataclass(frozen=True)
class Answer:
    """The content of a response, independent of its class.

    Attributes:
        text: the generated text so far.
        logprobs: one entry per token of the complete answer, or of the chunk; ``None`` if they are left out.
        metadata: for ``additional_kwargs``: the spans of the chunk, or the risk report of the complete answer.
        raw: the same; for the complete answer also its usage, finish reason and model.
        delta: the text that this chunk adds; ``None`` if the answer was not streamed.
        generation: the complete answer; ``None`` for a chunk.
        reasoning: the reasoning so far.
        start: the offset in the text at which the answer after the reasoning begins.
        reasoning_tokens: the number of tokens of the reasoning, once the answer is complete.
    """

    text: str
    logprobs: list[list[LogProb]] | None
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


class Reader(ABC, Generic[Response]):
    """Converts the answers of one call, or the partial answers of a stream, into responses.

    Create it inside the call.

    Args:
        delivery: what the responses carry besides their text.

    Attributes:
        passages: the retrieved nodes in the prompt of the call.
    """

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.passages = PassagesOfCall()

    def splitter(self) -> ReasoningSplitter | None:
        """The object that separates the reasoning of a stream; ``None`` if responses have all of the text."""
        return None

    def split(self, generation: Generation) -> Split | None:
        """The reasoning and the answer; ``None`` if responses have all of the text."""
        return None

    def parts(self, generation: Generation, split: Split | None) -> tuple[str, dict[str, Any]]:
        """The text of the response to a complete answer, and what is added to its report."""
        return generation.text, {}

    @abstractmethod
    def response(self, answer: Answer) -> Response:
        """The response for a complete or a partial answer."""


class CompletionReader(Reader[CompletionResponse]):
    """Converts the answers to a prompt. They have all of the text."""

    def response(self, answer: Answer) -> CompletionResponse:
        """The response for a complete or a partial answer."""
        return answer.to_completion()


def complete_answer(
    generation: Generation,
    engine: CocoaEngine,
    delivery: Delivery,
    split: Split | None = None,
    *,
    streamed: bool = False,
    content: str | None = None,
    parts: Mapping[str, Any] | None = None,
) -> Answer:
    """The complete answer. At the end of a stream it is a further chunk that adds no text.

    Args:
        generation: the answer.
        engine: the engine that answered.
        delivery: what the response carries besides its text.
        split: separates the reasoning of the answer.
        streamed: whether it ends a stream.
        content: the text of the response, if it is not all of the generated text.
        parts: what is added to the report.
    """
    reasoning = "" if split is None else split.reasoning
    stored = Stored(generation.text if content is None else content, reasoning)
    usage = {**generation.usage.model_dump(), "total_tokens": generation.usage.total_tokens}

    def report() -> dict[str, Any]:  # not shared by metadata and raw: a change to one must not affect the other
        return {**risk_report(generation, split), **deepcopy(dict(parts or {}))}

    logprobs = None
    if delivery.has_logprobs(streamed=streamed):
        tokens = TokenLogprobs(engine)
        logprobs = [entry for span in generation.spans for entry in _log_probs(tokens, span)]
    return Answer(
        text=generation.text,
        logprobs=logprobs,
        metadata=delivery.metadata(report(), stored, streamed=streamed),
        raw={
            "model": generation.model_name,
            "model_name": generation.model_name,
            "finish_reason": generation.finish_reason,
            "usage": usage,
            **delivery.raw(report()),
        },
        delta="" if streamed else None,
        generation=generation,
        reasoning=reasoning,
        start=split.answer_start if split is not None else 0,
        reasoning_tokens=split.reasoning_tokens(generation) if split is not None else None,
    )


class Chunks:
    """Converts the spans of a stream, in order, into partial answers.

    Args:
        engine: the engine that answers.
        delivery: what the chunks carry besides their text.
        splitter: separates the reasoning. Spans are then held back until it is known whether the answer begins with
            reasoning.
    """

    def __init__(self, engine: CocoaEngine, delivery: Delivery, splitter: ReasoningSplitter | None = None) -> None:
        self._tokens = TokenLogprobs(engine)
        self._delivery = delivery
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
            logprobs=_log_probs(self._tokens, span) if self._delivery.has_logprobs(streamed=True) else None,
            metadata=self._delivery.of_span(span, number, part),
            raw=self._delivery.of_span(span, number, part),
            delta=span.text,
            reasoning=self._splitter.reasoning if self._splitter is not None and is_last else "",
            start=min(self._splitter.answer_start, len(self._text)) if self._splitter is not None else 0,
        )


def _log_probs(tokens: TokenLogprobs, span: Span) -> list[list[LogProb]]:
    """The entries of each token: with ``top_logprobs`` the most probable tokens, as LlamaIndex's OpenAI LLM gives them,
    and the token itself if it is not among them; otherwise the token alone.
    """
    return log_probs_of(tokens.of(span))


def log_probs_of(tokens: Iterable[Mapping[str, Any]]) -> list[list[LogProb]]:
    """The entries of tokens in the format of OpenAI's ``logprobs``."""
    found = []
    for token in tokens:
        entries = token["top_logprobs"]
        if all((each["token"], each["logprob"]) != (token["token"], token["logprob"]) for each in entries):
            entries = [*entries, token]
        found.append(
            [LogProb(token=each["token"], logprob=each["logprob"], bytes=each["bytes"] or []) for each in entries]
        )
    return found
