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
from transformers import EosTokenCriteria
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
from cocoa_engine.integration import Criterion, require_unicode
from cocoa_engine.report import Part, RiskReport, SpanReport
from cocoa_integrations._shared.engines import AsyncStream, LazyEngine, in_worker
from cocoa_integrations._shared.logprobs import TokenLogprobs
from cocoa_integrations._shared.options import text_ends_inside_reasoning
from cocoa_integrations._shared.reasoning import Split
from cocoa_integrations.chat_service.answer import Answer, ChatCall, Piece, Token
from cocoa_integrations.tool_calling import Call, CallDelta, Plan, Reading, new_id, parts_of_report

Result = TypeVar("Result")

RETRY_PAUSE = 0.5
"""Seconds before the first retry; doubled before each further one."""


class LocalChat:
    """A chat service of a model in this process.

    A call is tried ``max_retries`` times again after it ran out of GPU memory, which other work may have used. Other
    errors would come again.
    """

    def __init__(self, engine: CocoaEngine | LazyEngine, *, max_retries: int = 0) -> None:
        self._engine = engine
        self._max_retries = max_retries

    @property
    def engine(self) -> CocoaEngine:
        """The engine; loads it if it is not loaded yet."""
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
        if not calls:
            return []
        for call in calls:
            _require_text(call)
        first, engine = calls[0], self.engine
        prompts: list[Any] = [call.prompt for call in calls]
        options = {"config": first.config, "batch_size": batch_size, **PreparedCall(engine, first).options}
        generations = self._retrying(partial(engine.generate_batch, prompts, **options))
        return [PreparedCall(engine, call).made(answer) for call, answer in zip(calls, generations, strict=True)]

    def stream(self, call: ChatCall) -> LocalStream:
        """The answer to a call, span by span. Nothing is decoded before the first one is asked for."""
        cancellation = Cancellation()
        call = replace(call, cancellation=cancellation)
        return LocalStream(self._engine, lambda: self._prepared(call), cancellation, retrying=self._retrying)

    async def aanswer(self, call: ChatCall, on_piece: Callable[[Piece], None] | None = None) -> Answer:
        """See :meth:`answer`. Cancelling the task ends the work."""
        if on_piece is None:
            with _cancelled_at_end() as cancellation:
                return await in_worker(self._engine, self.answer, replace(call, cancellation=cancellation))
        async with self.stream(call) as stream:
            async for pieces in stream:
                for piece in pieces:
                    on_piece(piece)
        return stream.answer

    async def aanswers(self, calls: Sequence[ChatCall], batch_size: int | None = None) -> list[Answer]:
        """See :meth:`answers`."""
        with _cancelled_at_end() as cancellation:
            calls = [replace(call, cancellation=cancellation) for call in calls]
            return await in_worker(self._engine, self.answers, calls, batch_size)

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


class PreparedCall:
    """A call whose prompt is rendered, for one or several answers. The grammar is compiled when it is first needed.

    For a prompt ``messages`` is empty. ``is_chat`` says whether answers are divided into reasoning, calls and text.
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
        self.is_chat = call.messages is not None or call.splits_reasoning
        self._ids: list[int] | None = None
        self._constraints: list[GrammarProcessor] | None = None
        self._limit = [] if call.timeout is None else [time_limit(call.timeout)]
        # the engine is given token ids where passages are found in their text, and where they are counted
        self._as_ids = call.messages is None or call.context_window is not None or callable(call.source)

    # not `cached_property`: up to Python 3.11 it lets one call at a time compute

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the prompt."""
        if self._ids is None:
            prompt = self.call.prompt
            if self.call.messages is not None:
                self._ids = self.engine.encode_chat(self.messages, **self.template_kwargs)
            else:
                self._ids = self.engine.encode(prompt) if isinstance(prompt, str) else prompt
        return self._ids

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the engine, besides the prompt, its passages and the settings. Compiles the grammar."""
        if self._constraints is None:
            self._constraints = self.plan.processors(self.messages, self.template_kwargs)
        ends = map(EosTokenCriteria, self.plan.call_ends)
        options: dict[str, Any] = {
            "logits_processor": [*self.call.logits_processor, *self._constraints],
            "stopping_criteria": [*self.call.stopping_criteria, *self._limit, *ends],
            "cancellation": self.call.cancellation,
        }
        if inner := self.plan.inner_ends:
            options["stopping_criteria"].append(self._is_over)
            options["ignored_ends"] = inner
        return options

    def _is_over(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> bool:
        """A stopping criterion: whether an end that calls have, too, has ended the answer."""
        return self.plan.is_over(input_ids[0, len(self.token_ids) :].tolist())

    def answer(self, config: CocoaConfig | None = None) -> Answer:
        """A whole answer; ``config`` are its settings, by default those of the call."""
        timeline = Timeline()
        ask = self.engine.generate if self._as_ids else self.engine.chat
        prompt, options = self._decoding(config)
        return self.made(ask(prompt, timeline=timeline, **options), timeline)

    def open(self, config: CocoaConfig | None = None, timeline: Timeline | None = None) -> SpanStream:
        """The spans of an answer, which are decoded as they are read; see :meth:`answer`."""
        ask = self.engine.stream if self._as_ids else self.engine.stream_chat
        prompt, options = self._decoding(config)
        return ask(prompt, timeline=timeline, **options)

    def _decoding(self, config: CocoaConfig | None) -> tuple[Any, dict[str, Any]]:
        call, config = self.call, config or self.call.config
        if call.context_window is not None and self.token_ids:  # the engine refuses an empty prompt
            remaining = call.context_window - len(self.token_ids)
            if remaining < 1:
                raise PromptError(
                    f"the prompt has {len(self.token_ids)} tokens and context_window is {call.context_window}: no "
                    f"tokens are left for an answer. Shorten the prompt by at least {1 - remaining} tokens."
                )
            config = config.replace(max_new_tokens=min(config.max_new_tokens, remaining))
        source = call.source
        if callable(source):
            source = source(partial(self.engine.decode, self.token_ids), self.engine)
        options = {"config": config, "source": source or None, **self.options}
        if self._as_ids:
            return self.token_ids, options
        return self.messages, {**options, "template_kwargs": self.template_kwargs}

    def made(
        self,
        generation: Generation,
        timeline: Timeline | None = None,
        reading: Reading | None = None,
        growing: GrowingAnswer | None = None,
    ) -> Answer:
        """The answer that a generation is.

        Of an answer that was streamed, ``reading`` is the parsed text, and ``growing`` has the ids of its calls and the
        entries of its tokens. An :class:`~.errors.IncompleteAnswerError` is raised if its JSON or a call does not fit
        the schema, and must.
        """
        # a prompt that is no chat's has no reasoning
        split = self.plan.split(generation) if self.is_chat else Split("", 0, None, generation)
        text, logprobs = generation.text, None if growing is None else growing.logprobs
        reading = reading or self.plan.read(text, start=split.answer_start, marks=split.marks)
        ids = [new_id() for _ in reading.calls] if growing is None else growing.ids
        if self.call.logprobs and growing is None:
            logprobs = TokenLogprobs(self.engine, special=self.call.lists_special).of_answer(generation.spans)
        calls = [
            replace(call, id=call_id, text=text[slice(*call.offsets)])
            for call_id, call in zip(ids, reading.calls, strict=True)
        ]

        def report() -> RiskReport:
            whole = split.report(generation, rivals=self.call.candidates)
            return whole.with_values(**parts_of_report(generation, self.plan, split, calls))

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
            make_report=report,
            generation=generation,
            answered=split.answered,
            timeline=timeline,
        )


class LocalStream(AsyncStream[list[Piece]]):
    """An answer while it is decoded: for each decided span, the pieces that can be shown.

    A span can have no piece yet, until it is known whether the answer begins with reasoning. Iterating decodes, in the
    thread that iterates, and with ``async for`` in worker threads of the engine; leaving the context of such a loop
    cancels the work. ``retrying`` calls a function, and again if it runs out of memory.
    """

    def __init__(
        self,
        engine: CocoaEngine | LazyEngine,
        prepare: Callable[[], PreparedCall],
        cancellation: Cancellation,
        config: CocoaConfig | None = None,
        retrying: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> None:
        super().__init__(engine, self)
        self._prepare, self._cancellation, self._config, self._retrying = prepare, cancellation, config, retrying
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

    async def __aenter__(self) -> Self:
        try:
            await in_worker(self._engine, self.open)
        except BaseException:
            self._cancellation.cancel()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._cancellation.cancel()

    def close(self) -> None:
        """Stop decoding. Can be called from any thread."""
        if self._spans is not None:
            self._spans.close()
        with suppress(ValueError):  # a worker thread is inside the generator, which cannot be closed from outside
            self._steps.close()

    def _decoded(self) -> Generator[list[Piece], None, None]:
        prepared = self.open()
        call, opened = prepared.call, self._spans
        tokens = TokenLogprobs(prepared.engine, special=call.lists_special) if call.logprobs else None
        entry_of = partial(SpanReport.of, rivals=call.candidates)
        growing = GrowingAnswer(prepared.plan, splits=prepared.is_chat, entry_of=entry_of, tokens=tokens)

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


class GrowingAnswer:
    """Parses an answer span by span. A call begins when its name is complete.

    Spans are held back until it is known whether the answer begins with reasoning: in most cases, until the first
    visible character. ``ids`` are those of the calls so far, ``logprobs`` the entries of the tokens, if ``tokens``
    lists them. Without ``splits`` there is no reasoning.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        splits: bool = True,
        entry_of: Callable[[Span, int, Part | None], SpanReport] = SpanReport.of,
        tokens: TokenLogprobs | None = None,
    ) -> None:
        self._plan, self._entry_of, self._tokens = plan, entry_of, tokens
        self._splitter = plan.splitter()
        if not splits:
            self._splitter.finish()  # before any text: there is no reasoning
        self.ids: list[str] = []
        self.logprobs: list[Token] | None = None if tokens is None else []
        self._held: list[Span] = []
        self._passed_on = 0  # spans
        self._end = 0  # of the text of these spans
        self._reasoning = self._content = 0  # characters returned so far
        self._written: list[int] = []  # the same of the arguments of each call

    def add(self, span: Span) -> list[Piece]:
        """Add a span, and return the pieces that can be passed on."""
        self._held.append(span)
        self._splitter.add(span)
        return self._released() if self._splitter.settled else []

    def finish(self) -> tuple[list[Piece], Piece, Reading]:
        """The pieces that were held back, what no span adds, and the parsed answer."""
        self._splitter.finish()
        held = self._released()
        splitter = self._splitter
        reading = self._plan.read(splitter.text, start=splitter.answer_start, marks=splitter.marks)
        reasoning = self._new_reasoning()
        content, calls = self._new_parts(reading.content, reading.calls)
        return held, Piece(None, content, reasoning, calls), reading

    def _released(self) -> list[Piece]:
        pieces: list[Piece] = []
        for span in self._held:
            self._end += len(span.text)
            start = min(self._splitter.answer_start, self._end)
            marks = tuple(mark for mark in self._splitter.marks if mark[0] <= self._end)
            reading = self._plan.read(self._splitter.text[: self._end], done=False, start=start, marks=marks)
            allowed = list(takewhile(lambda call: call.error is None, reading.calls))
            content, calls = self._new_parts(reading.content, allowed)
            reasoning = "" if pieces else self._new_reasoning()
            entry = self._entry_of(span, self._passed_on, self._splitter.part(span))
            listed = None if self._tokens is None else self._tokens.of(span)
            if self.logprobs is not None and listed:
                self.logprobs += listed
            pieces.append(Piece(entry, content, reasoning, calls, span, listed))
            self._passed_on += 1
        self._held = []
        return pieces

    def _new_reasoning(self) -> str:
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


def time_limit(seconds: float) -> Criterion:
    """A stopping criterion that raises an error after some seconds. The engine calls it after every step.

    If it stopped the answer instead, a truncated answer would look like a complete one, and no fallback would run.
    """
    deadline = time.monotonic() + seconds

    def is_over(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if time.monotonic() > deadline:
            raise GenerationTimeoutError(
                f"no complete answer within {seconds:g} s; raise timeout or lower max_new_tokens"
            )
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    return is_over
