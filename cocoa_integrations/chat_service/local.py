"""The chat service of a model in this process: the engine with the tools, the reasoning and the risk of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from cocoa_engine import (
    Cancellation,
    CocoaConfig,
    CocoaEngine,
    Generation,
    GrammarProcessor,
    Span,
    SpanStream,
    Timeline,
)
from cocoa_engine.errors import GenerationTimeoutError, PromptError
from cocoa_engine.model.text import require_unicode
from cocoa_engine.report import Part, RiskReport, SpanReport
from cocoa_integrations._shared.chat_template import text_ends_inside_reasoning
from cocoa_integrations._shared.loading import LazyEngine
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations._shared.workers import AsyncStream, in_worker
from cocoa_integrations.chat_service.answer import Answer, ChatCall, Piece, Token
from cocoa_integrations.tool_calling import Call, CallDelta, Plan, Reading, new_id, parts_of_report

Result = TypeVar("Result")

RETRY_PAUSE = 0.5
"""Seconds before the first retry; doubled before each further one."""


class LocalChat:
    """A chat service of a model in this process.

    Args:
        engine: the engine, or what will load it.
        max_retries: how often a call is tried again after it ran out of GPU memory, which other work may have used.
            Other errors would come again.
    """

    def __init__(self, engine: CocoaEngine | LazyEngine, *, max_retries: int = 0) -> None:
        self._engine = engine
        self._max_retries = max_retries

    @property
    def engine(self) -> CocoaEngine:
        """The engine; loads it if it is not loaded yet.

        Raises:
            ModelLoadError: the model cannot be loaded.
        """
        return self._engine.get() if isinstance(self._engine, LazyEngine) else self._engine

    def answer(self, call: ChatCall, on_piece: Callable[[Piece], None] | None = None) -> Answer:
        """The whole answer to a call; ``on_piece`` is told of each span, as soon as that is decided if it can be."""
        if on_piece is None:
            return self._retrying(self._prepared(call).answer)
        with closing(self.stream(call)) as stream:
            for piece in chain.from_iterable(stream):
                on_piece(piece)
        return stream.answer

    def answers(self, calls: Sequence[ChatCall], batch_size: int | None = None) -> list[Answer]:
        """The answers to several prompts, decoded together; ``batch_size`` at a time.

        All calls have the prompt of a text and the other options of the first.
        """
        for call in calls:
            _require_text(call)
        first, engine = calls[0], self.engine
        prompts: list[Any] = [call.prompt for call in calls]
        options = PreparedCall(engine, first).options
        decode = partial(engine.generate_batch, prompts, config=first.config, batch_size=batch_size, **options)
        generations = self._retrying(decode)
        return [PreparedCall(engine, call).made(each) for call, each in zip(calls, generations, strict=True)]

    def stream(self, call: ChatCall) -> LocalStream:
        """The answer to a call, span by span. Nothing is decoded before the first one is asked for."""
        return LocalStream(lambda: self._prepared(call), retrying=self._retrying)

    async def aanswer(self, call: ChatCall, on_piece: Callable[[Piece], None] | None = None) -> Answer:
        """See :meth:`answer`. Cancelling the task ends the work."""
        if on_piece is None:
            with _cancelled_at_end() as cancellation:
                return await in_worker(self._engine, self.answer, replace(call, cancellation=cancellation))
        async with self.astream(call) as stream:
            async for pieces in stream:
                for piece in pieces:
                    on_piece(piece)
        return stream.answer

    async def aanswers(self, calls: Sequence[ChatCall], batch_size: int | None = None) -> list[Answer]:
        """See :meth:`answers`."""
        with _cancelled_at_end() as cancellation:
            calls = [replace(call, cancellation=cancellation) for call in calls]
            return await in_worker(self._engine, self.answers, calls, batch_size)

    def astream(self, call: ChatCall) -> AsyncLocalStream:
        """See :meth:`stream`. Leaving the context ends the work."""
        cancellation = Cancellation()
        return AsyncLocalStream(self._engine, self.stream(replace(call, cancellation=cancellation)), cancellation)

    def prompt_ids(self, call: ChatCall) -> list[int]:
        """The token ids of the prompt of a call."""
        return PreparedCall(self.engine, replace(call, source=None)).token_ids

    def prompt_text(self, call: ChatCall) -> str:
        """The text of the prompt of a conversation."""
        prepared = PreparedCall(self.engine, call)
        return self.engine.render_chat(prepared.messages, **prepared.template_kwargs)

    def _prepared(self, call: ChatCall) -> PreparedCall:
        _require_text(call)
        return PreparedCall(self.engine, call)

    def _retrying(self, work: Callable[[], Result]) -> Result:
        for attempt in range(self._max_retries):
            try:
                return work()
            except torch.OutOfMemoryError:
                pass  # the traceback holds tensors of the failed call until the handler is left
            torch.cuda.empty_cache()
            time.sleep(RETRY_PAUSE * 2**attempt)
        return work()


class PreparedCall:
    """A call whose prompt is rendered, for one or several answers. The grammar is compiled when it is first needed.

    Attributes:
        plan: the tools, the grammar and the parser.
        messages: the messages for the chat template; empty for a prompt.
        template_kwargs: the other arguments of the chat template.

    Raises:
        ConfigError: the chat template has no variable ``enable_thinking``, and the option is given.
        PromptError: the message to be continued is not an assistant's.
    """

    def __init__(self, engine: CocoaEngine, call: ChatCall) -> None:
        self.engine, self.call = engine, call
        self.plan = Plan(call.tools, engine, call.template, calls_must_fit=call.calls_must_fit)
        self.messages: list[dict[str, Any]] = []
        self.template_kwargs: dict[str, Any] = {}
        if call.messages is not None:
            self.messages, self.template_kwargs = self.plan.prompt(call.messages)
        elif call.splits_reasoning and isinstance(call.prompt, str):
            self.plan.inside_reasoning = text_ends_inside_reasoning(call.prompt)
        self._ids: list[int] | None = None
        self._constraints: list[GrammarProcessor] | None = None
        self._limit = [] if call.timeout is None else [TimeLimit(call.timeout)]

    @property
    def is_chat(self) -> bool:
        """Whether answers are divided into reasoning, calls and text."""
        return self.call.messages is not None or self.call.splits_reasoning

    # not `cached_property`: up to Python 3.11 it lets one call at a time compute

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the prompt."""
        if self._ids is None:
            if self.call.messages is not None:
                self._ids = self.engine.encode_chat(self.messages, **self.template_kwargs)
            else:
                prompt = self.call.prompt
                self._ids = self.engine.encode(prompt) if isinstance(prompt, str) else prompt
        return self._ids

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the engine, besides the prompt, its passages and the settings.

        Raises:
            PromptError: the prompt does not fit the context window.
            ConfigError: a part of a schema can neither be enforced nor validated, or the tokenizer is not fast.
        """
        if self._constraints is None:
            self._constraints = self.plan.processors(self.messages, self.template_kwargs)
        return {
            "logits_processor": [*self.call.logits_processor, *self._constraints],
            "stopping_criteria": [*self.call.stopping_criteria, *self._limit],
            "cancellation": self.call.cancellation,
        }

    def answer(self, config: CocoaConfig | None = None) -> Answer:
        """A whole answer; ``config`` are its settings, by default those of the call."""
        timeline = Timeline()
        ask = self.engine.generate if self._as_ids else self.engine.chat
        return self.made(ask(*self._prompt, timeline=timeline, **self._decoding(config)), timeline)

    def open(self, config: CocoaConfig | None = None, timeline: Timeline | None = None) -> SpanStream:
        """The spans of an answer, which are decoded as they are read; see :meth:`answer`."""
        ask = self.engine.stream if self._as_ids else self.engine.stream_chat
        return ask(*self._prompt, timeline=timeline, **self._decoding(config))

    def made(
        self,
        generation: Generation,
        timeline: Timeline | None = None,
        reading: Reading | None = None,
        growing: GrowingAnswer | None = None,
    ) -> Answer:
        """The answer that a generation is.

        Args:
            generation: the generation.
            timeline: the phases of the call.
            reading: the generated text, if it has been parsed.
            growing: what was streamed of the answer; it has the ids of its calls and the entries of its tokens.

        Raises:
            IncompleteAnswerError: its JSON or a call does not fit the schema, and must.
        """
        # a prompt that is no chat's has no reasoning
        split = self.plan.split(generation) if self.is_chat else Split("", 0, None, generation)
        text, logprobs = generation.text, None
        reading = reading or self.plan.read(text, start=split.answer_start)
        ids = [new_id() for _ in reading.calls] if growing is None else growing.ids
        if self.call.logprobs:
            logprobs = self.tokens().of_answer(generation.spans) if growing is None else growing.logprobs
        calls = [
            replace(call, id=call_id, text=text[slice(*call.offsets)])
            for call_id, call in zip(ids, reading.calls, strict=True)
        ]
        return Answer(
            text=text,
            content=reading.content,
            reasoning=split.reasoning,
            calls=calls,
            finish_reason=generation.finish_reason,
            model_name=generation.model_name,
            usage=generation.usage,
            reasoning_tokens=None if split.parts is None else split.reasoning_tokens(generation),
            logprobs=logprobs,
            make_report=partial(self._report, generation, split, calls),
            generation=generation,
            split=split,
            timeline=timeline,
        )

    def tokens(self) -> TokenLogprobs:
        """Lists the tokens of an answer."""
        return TokenLogprobs(self.engine, special=self.call.lists_special)

    def entry(self, span: Span, number: int, part: Part | None) -> SpanReport:
        """The report of a span."""
        return SpanReport.of(span, number, part, rivals=self.call.candidates)

    def _report(self, generation: Generation, split: Split, calls: Sequence[Call]) -> RiskReport:
        report = split.report(generation, rivals=self.call.candidates)
        return report.with_values(**parts_of_report(generation, self.plan, split, calls))

    @property
    def _as_ids(self) -> bool:
        """Whether the engine is given token ids: passages are found in their text, and they are counted."""
        call = self.call
        return call.messages is None or call.context_window is not None or hasattr(call.source, "source")

    @property
    def _prompt(self) -> tuple[Any]:
        return (self.token_ids if self._as_ids else self.messages,)

    def _decoding(self, config: CocoaConfig | None) -> dict[str, Any]:
        call, config = self.call, config or self.call.config
        if call.context_window is not None and self.token_ids:  # the engine refuses an empty prompt
            remaining = call.context_window - len(self.token_ids)
            if remaining < 1:
                raise PromptError(
                    f"the prompt has {len(self.token_ids)} tokens and context_window is {call.context_window}: no "
                    f"tokens are left for an answer. Shorten the prompt by at least {1 - remaining} tokens."
                )
            config = config.replace(max_new_tokens=min(config.max_new_tokens, remaining))
        source: Any = call.source
        if hasattr(source, "source"):
            source = source.source(partial(self.engine.decode, self.token_ids), self.engine)
        template = {} if self._as_ids else {"template_kwargs": self.template_kwargs}
        return {"config": config, "source": source or None, **template, **self.options}


class LocalStream:
    """An answer while it is decoded: for each decided span, the pieces that can be shown.

    A span can have no piece yet, until it is known whether the answer begins with reasoning. Iterating decodes, in the
    thread that iterates.

    Args:
        prepare: makes the prepared call.
        config: the settings, if they are not those of the call.
        retrying: calls a function, and again if it runs out of memory.
    """

    def __init__(
        self,
        prepare: Callable[[], PreparedCall],
        config: CocoaConfig | None = None,
        retrying: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> None:
        self._prepare, self._config, self._retrying = prepare, config, retrying
        self._prepared: PreparedCall | None = None
        self._spans: SpanStream | None = None
        self._timeline = Timeline()
        self._answer: Answer | None = None
        self._steps = self._decoded()

    def open(self) -> PreparedCall:
        """Render the prompt and compile the grammar, if that has not been done. Nothing is decoded."""
        if self._prepared is None:
            prepared = self._prepare()
            self._spans = self._retrying(lambda: prepared.open(self._config, self._timeline))
            self._prepared = prepared
        return self._prepared

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has been read to its end."""
        assert self._answer is not None
        return self._answer

    @property
    def prompt_progress(self) -> tuple[int, int] | None:
        """The number of prompt tokens read so far, and the length of the prompt; ``None`` before it is known."""
        return None if self._spans is None else self._spans.prompt_progress

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Piece]:
        return next(self._steps)

    def close(self) -> None:
        """Stop decoding. Can be called from any thread."""
        if self._spans is not None:
            self._spans.close()
        with suppress(ValueError):  # a worker thread is inside the generator, which cannot be closed from outside
            self._steps.close()

    def _decoded(self) -> Generator[list[Piece], None, None]:
        prepared = self.open()
        tokens = prepared.tokens() if prepared.call.logprobs else None
        growing = GrowingAnswer(prepared.plan, splits=prepared.is_chat, entry_of=prepared.entry, tokens=tokens)
        opened = self._spans

        def first_span() -> tuple[SpanStream, Span | None]:
            nonlocal opened
            self._spans, opened = opened or prepared.open(self._config, self._timeline), None  # it ran out of memory
            return self._spans, next(self._spans, None)

        spans, span = self._retrying(first_span)
        with spans:
            while span is not None:
                yield growing.add(span)
                span = next(spans, None)
        assert spans.generation is not None
        held, rest, reading = growing.finish()
        if held:
            yield held
        self._answer = replace(prepared.made(spans.generation, self._timeline, reading, growing), rest=rest)


class AsyncLocalStream(AsyncStream[list[Piece]]):
    """A :class:`LocalStream` whose steps run in worker threads of the engine."""

    def __init__(self, engine: CocoaEngine | LazyEngine, stream: LocalStream, cancellation: Cancellation) -> None:
        super().__init__(engine, stream)
        self._local, self._cancellation = stream, cancellation

    async def __aenter__(self) -> Self:
        try:
            await in_worker(self._engine, self._local.open)
        except BaseException:
            self._cancellation.cancel()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._cancellation.cancel()

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has been read to its end."""
        return self._local.answer


class GrowingAnswer:
    """Parses an answer span by span. A call begins when its name is complete.

    Spans are held back until it is known whether the answer begins with reasoning: in most cases, until the first
    visible character.

    Args:
        plan: the plan, whose prompt has been made.
        splits: whether the answer is divided into reasoning and text.
        entry_of: makes the report of a span, of its number and its part.
        tokens: lists the tokens of spans, if they are asked for.

    Attributes:
        ids: the ids of the calls so far.
        logprobs: the entries of the tokens so far, if they are asked for.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        splits: bool = True,
        entry_of: Callable[[Span, int, Part | None], SpanReport] | None = None,
        tokens: TokenLogprobs | None = None,
    ) -> None:
        self._plan, self._entry_of = plan, entry_of or SpanReport.of
        self._splitter = plan.splitter() if splits else None
        self._tokens = tokens
        self.ids: list[str] = []
        self.logprobs: list[Token] | None = None if tokens is None else []
        self._text = ""
        self._held: list[Span] = []
        self._passed_on = 0  # spans
        self._end = 0  # of the text of these spans
        self._reasoning = self._content = 0  # characters returned so far
        self._written: list[int] = []  # the same of the arguments of each call

    def add(self, span: Span) -> list[Piece]:
        """Add a span, and return the pieces that can be passed on."""
        self._text += span.text
        self._held.append(span)
        if self._splitter is not None:
            self._splitter.add(span)
        return self._released() if self._splitter is None or self._splitter.settled else []

    def finish(self) -> tuple[list[Piece], Piece, Reading]:
        """The pieces that were held back, what no span adds, and the parsed answer."""
        if self._splitter is not None:
            self._splitter.finish()
        held = self._released()
        start = 0 if self._splitter is None else self._splitter.answer_start
        reading = self._plan.read(self._text, start=start)
        reasoning = self._new_reasoning()
        content, calls = self._new_parts(reading.content, reading.calls)
        return held, Piece(None, content, reasoning, calls), reading

    def _released(self) -> list[Piece]:
        pieces: list[Piece] = []
        for span in self._held:
            self._end += len(span.text)
            part = None if self._splitter is None else self._splitter.part(span)
            start = 0 if self._splitter is None else min(self._splitter.answer_start, self._end)
            reading = self._plan.read(self._text[: self._end], done=False, start=start)
            allowed = list(takewhile(lambda call: call.error is None, reading.calls))
            content, calls = self._new_parts(reading.content, allowed)
            reasoning = "" if pieces else self._new_reasoning()
            entry = self._entry_of(span, self._passed_on, part)
            listed = None if self._tokens is None else self._tokens.of(span)
            if self.logprobs is not None and listed:
                self.logprobs += listed
            pieces.append(Piece(entry, content, reasoning, calls, span, listed))
            self._passed_on += 1
        self._held = []
        return pieces

    def _new_reasoning(self) -> str:
        if self._splitter is None:
            return ""
        new = self._splitter.reasoning[self._reasoning :]
        self._reasoning += len(new)
        return new

    def _new_parts(self, content: str, calls: Sequence[Call]) -> tuple[str, list[CallDelta]]:
        new_content = content[self._content :]
        self._content += len(new_content)
        deltas = []
        for number, call in enumerate(calls):
            begins = number == len(self._written)
            if begins:
                if call.name is None and call.error is None:
                    break
                self._written.append(0)
                self.ids.append(new_id())
            written = call.written[self._written[number] :]
            self._written[number] += len(written)
            if begins or written or call.error is not None:
                name, call_id = (call.name, self.ids[number]) if begins else (None, None)
                deltas.append(CallDelta(number, call_id, name, written, call.error))
        return new_content, deltas


class TimeLimit:
    """A stopping criterion that raises an error after some ``seconds``. The engine calls it after every step.

    If it stopped the answer instead, a truncated answer would look like a complete one, and no fallback would run.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``False`` for every row, [B]: no row is stopped.

        Raises:
            GenerationTimeoutError: the time limit is exceeded.
        """
        if time.monotonic() > self.deadline:
            raise GenerationTimeoutError(
                f"no complete answer within {self.seconds:g} s; raise timeout or lower max_new_tokens"
            )
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _require_text(call: ChatCall) -> None:
    """Refuse a prompt that is empty or has a lone surrogate, before a model is loaded."""
    if call.messages is None and not call.prompt:
        raise PromptError("the prompt is empty; give some text.")
    if isinstance(call.prompt, str):
        require_unicode(call.prompt, "prompt")


@contextmanager
def _cancelled_at_end() -> Iterator[Cancellation]:
    """A cancellation that ends what a task has asked for when the task leaves the context."""
    cancellation = Cancellation()
    try:
        yield cancellation
    finally:
        cancellation.cancel()
