"""Answers of completions: whole ones, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cocoa_engine import Cancellation, CocoaConfig, CocoaEngine, Generation, SpanStream, Timeline, Usage
from cocoa_engine.errors import PromptError
from cocoa_engine.model.callables import Processor
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.metadata import RISK_KEY, SPANS_KEY
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations.server.errors import of_parameter
from cocoa_integrations.server.protocol.chat_answer import FINISH_REASONS, Answered
from cocoa_integrations.server.protocol.completion_request import CompletionRequest, TextOrIds
from cocoa_integrations.server.protocol.prompt_logprobs import prompt_logprobs
from cocoa_integrations.server.protocol.risk_fields import RiskFields

Entries = list[dict[str, Any]]


@dataclass(frozen=True)
class CompletionJob:
    """The completions of one prompt, ready to be decoded in worker threads.

    Attributes:
        engine: the engine.
        prompt: the prompt.
        first: the index of its first answer among all choices.
        logprobs: the number of most probable tokens that are listed for each token; ``None`` lists no tokens.
        echo: whether answers begin with the prompt.
        only_echo: whether nothing is decoded.
        fields: how the risk is written.
        processors: logits processors of the request.
        source: the passages in the prompt.
        cancellation: ends the work.
    """

    engine: CocoaEngine
    prompt: TextOrIds
    first: int
    logprobs: int | None
    echo: bool
    only_echo: bool
    fields: RiskFields
    processors: Sequence[Processor]
    source: Sequence[str] | None
    cancellation: Cancellation

    @classmethod
    def all_of(
        cls, body: CompletionRequest, engine: CocoaEngine, cancellation: Cancellation, *, allow_logprobs: bool
    ) -> list[CompletionJob]:
        """The jobs of a request, one for each prompt.

        Args:
            body: the request.
            engine: the engine.
            cancellation: ends the work.
            allow_logprobs: whether the server writes risk into ``logprobs``.
        """
        # `logprobs` without tokens would surprise clients of this old protocol
        listed = body.logprobs is not None
        fields = RiskFields.of(body.options, listed, allow_logprobs=allow_logprobs)
        shared = (body.echoes, body.only_echoes, fields, body.processors(engine), body.options.source, cancellation)
        return [
            cls(engine, prompt, number * body.answers, body.logprobs, *shared)
            for number, prompt in enumerate(body.prompts)
        ]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the engine that all answers share."""
        return {
            "cancellation": self.cancellation,
            "logits_processor": list(self.processors),
            "source": self.source or None,
        }

    @cached_property
    def token_ids(self) -> list[int]:
        """The token ids of the prompt."""
        return self.engine.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt

    @cached_property
    def echoed(self) -> tuple[str, Entries]:
        """The prompt's text as answers begin with it, and the entries of its tokens, if they are listed.

        The prompt is read in one forward pass.

        Raises:
            PromptError: the prompt is too long, or has unknown token ids.
        """
        if not self.echo:
            return "", []
        text = self.prompt if isinstance(self.prompt, str) else self.engine.decode(self._known_ids)
        if self.logprobs is None:
            return text, []
        self.cancellation.check()
        return text, prompt_logprobs(self.engine, self.token_ids, self.logprobs, self.cancellation)

    def answer(self, number: int, config: CocoaConfig) -> Answered:
        """Decode one whole answer.

        Args:
            number: the number of the answer among those to this prompt.
            config: its settings.
        """
        with of_parameter("prompt"):
            text, entries = self.echoed
            if self.only_echo:
                return self._echo(number, config, text, entries)
            timeline = Timeline()
            generation = self.engine.generate(self.token_ids, config=config, timeline=timeline, **self.options)
        listed = None
        if self.logprobs is not None:
            tokens = TokenLogprobs(self.engine, special=True)
            answered = [entry for span in generation.spans for entry in tokens.of(span)]
            listed = token_lists([*entries, *answered])
        report = self.fields.report(generation, None) if self.fields.reported else {}
        choice = {
            **self.choice(number, text + generation.text, listed, RISK_KEY, report),
            "finish_reason": FINISH_REASONS[generation.finish_reason or "stop"],
            **self.fields.in_answer(report),
        }
        return Answered(generation, Split("", 0, None, generation), choice, timeline)

    def choice(self, number: int, text: str, logprobs: dict[str, Any] | None, key: str, risk: Any) -> dict[str, Any]:
        """A choice, or that of a chunk; ``risk`` is added to ``logprobs`` under ``key``."""
        if logprobs is not None and self.fields.in_logprobs and risk:
            logprobs = {**logprobs, key: risk}
        return {"index": self.first + number, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _echo(self, number: int, config: CocoaConfig, text: str, entries: Entries) -> Answered:
        """The prompt alone."""
        usage = Usage(prompt_tokens=len(self._known_ids), completion_tokens=0)
        nothing = Generation(text="", token_ids=[], spans=[], finish_reason="length", usage=usage, config=config)
        listed = None if self.logprobs is None else token_lists(entries)
        choice = {**self.choice(number, text, listed, RISK_KEY, None), "finish_reason": "length"}
        return Answered(nothing, Split("", 0, None, nothing), choice, Timeline())

    @property
    def _known_ids(self) -> list[int]:
        """The token ids, which must be in the vocabulary."""
        if wrong := [one for one in self.token_ids if not 0 <= one < len(self.engine.tokenizer)]:
            raise PromptError(f"token id {wrong[0]} is outside the vocabulary of {len(self.engine.tokenizer)}.")
        return self.token_ids


class CompletionStream:
    """One streamed answer: the choices of its chunks, without their envelope.

    Iterating over :meth:`choices` decodes, in the thread that iterates.

    Args:
        job: the prompt, and what is listed.
        number: the number of the answer among those to this prompt.
        config: its settings.

    Attributes:
        answered: the answer, once it is complete.
    """

    def __init__(self, job: CompletionJob, number: int, config: CocoaConfig) -> None:
        self.answered: Answered | None = None
        self._job, self._number, self._config = job, number, config
        self._stream: SpanStream | None = None
        self._end = 0  # characters of the text so far

    @property
    def prompt_progress(self) -> tuple[int, int] | None:
        """The number of prompt tokens read so far, and the length of the prompt; ``None`` before it is known."""
        return None if self._stream is None else self._stream.prompt_progress

    def choices(self) -> Generator[Entries, None, None]:
        """For each decided span, the choices of new chunks.

        Raises:
            ApiError: the prompt is not valid.
        """
        job, fields = self._job, self._job.fields
        with of_parameter("prompt"):
            text, entries = job.echoed
            if job.only_echo:
                self.answered = job.answer(self._number, self._config)
                yield [self.answered.choice]
                return
            echo = [self._chunk(text, entries)] if job.echo else []
            timeline = Timeline()
            stream = job.engine.stream(job.token_ids, config=self._config, timeline=timeline, **job.options)
        tokens = TokenLogprobs(job.engine, special=True)
        with stream:
            self._stream = stream
            for number, span in enumerate(stream):
                risks = [fields.span(span, number)] if fields.reported else []
                chunk = {**self._chunk(span.text, tokens.of(span), risks), **fields.in_delta(risks)}
                yield [*echo, chunk]
                echo = []
        generation = stream.generation
        assert generation is not None
        report = fields.report(generation, None) if fields.reported else {}
        last = {
            **job.choice(self._number, "", self._listed([]), RISK_KEY, report),
            "finish_reason": FINISH_REASONS[generation.finish_reason or "stop"],
            **fields.in_answer(report),
        }
        self.answered = Answered(generation, Split("", 0, None, generation), last, timeline)
        yield [*echo, last]

    def _chunk(self, text: str, entries: Entries, risks: Sequence[Any] = ()) -> dict[str, Any]:
        chunk = self._job.choice(self._number, text, self._listed(entries), SPANS_KEY, risks)
        self._end += len(text)
        return chunk

    def _listed(self, entries: Entries) -> dict[str, Any] | None:
        return None if self._job.logprobs is None else token_lists(entries, self._end)


def token_lists(entries: Sequence[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
    """``logprobs`` of a completion, from entries as chat completions have them.

    Args:
        entries: the tokens; special tokens are not part of the text.
        offset: the offset of the first token in the text.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"]) if entry["bytes"] is not None else 0
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_by_text(entry) for entry in entries],
        "text_offset": offsets,
    }


def _by_text(entry: dict[str, Any]) -> dict[str, float] | None:
    """Log-probabilities by the texts of the tokens: of the most probable ones, and of the token itself."""
    if entry["logprob"] is None:
        return None
    found: dict[str, float] = {}
    for rival in [*entry["top_logprobs"], entry]:
        found.setdefault(rival["token"], rival["logprob"])  # of tokens with the same text, the most probable one
    return found
