"""Tasks: requests while they are decoded, alone or in a batch."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from cocoa_engine.config import CocoaConfig
from cocoa_engine.decoding.request import FREE_LEAVES, Request
from cocoa_engine.decoding.span_decoder import SpanDecoder
from cocoa_engine.decoding.token_feed import Distributions, StateReader, TokenFeed
from cocoa_engine.errors import CalibrationError, ConfigError, UnsupportedModelError
from cocoa_engine.execution.backends import Backend, FeedRequest, StepOutput
from cocoa_engine.execution.scheduler import Work
from cocoa_engine.execution.session import Session
from cocoa_engine.interruptions import at_work
from cocoa_engine.methods import METHODS, ContrastingMethod
from cocoa_engine.model.language_model import CaptureSpec
from cocoa_engine.model.tokenizer import Detokenizer
from cocoa_engine.results import Generation
from cocoa_engine.risk import RiskCalibrator
from cocoa_engine.risk.policy import RiskMeasure, RiskPolicy, measures_source, reaches
from cocoa_engine.spans import Span, Usage

LOOP, LONGEST = 24, 8
"""The number of tokens in which a loop is looked for, and of the longest sequence that it repeats."""


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether the last :data:`LOOP` tokens repeat one sequence of at most :data:`LONGEST` tokens."""
    last = token_ids[-LOOP:]
    return len(last) == LOOP and any(last[size:] == last[:-size] for size in range(1, LONGEST + 1))


def complete_span(
    span: Span, text_range: tuple[int, int, str], config: CocoaConfig, measure: RiskMeasure, *, repeats: bool = False
) -> Span:
    """A measured span with its text and its risk.

    Args:
        span: the span. Its ``token_ends`` may lie behind its end, where a stop text was cut off.
        text_range: ``(start, end, text)`` of the span in the answer.
        repeats: whether the answer runs in a loop where the span ends.
    """
    start, end, text = text_range
    risk = measure(span)
    return span.model_copy(
        update={
            "text": text,
            "start": start,
            "end": end,
            "token_ends": [*(min(max(at, start), end) for at in span.token_ends[:-1]), end],
            "risk": risk.value,
            "risk_source": risk.source,
            "flagged": risk.flagged,
            "out_of_domain": measure.is_out_of_domain(span),
            "reaches_max_risk": reaches(risk.value, config.max_risk),
            "repeats": repeats,
        }
    )


def make_generation(
    spans: Sequence[Span], config: CocoaConfig, measure: RiskMeasure, usage: dict[str, int], **values: Any
) -> Generation:
    """The answer that consists of ``spans``.

    ``usage`` and ``values`` are the fields of :class:`.Usage` and :class:`.Generation` that do not follow from them.
    """
    token_ids = [token_id for span in spans for token_id in span.token_ids]
    risk_points = sum(span.kind == "risk_point" for span in spans)
    generation = Generation(
        text="".join(span.text for span in spans),
        token_ids=token_ids,
        spans=list(spans),
        usage=Usage(completion_tokens=len(token_ids), risk_points=risk_points, **usage),
        config=config,
        threshold=measure.threshold_of(spans[0].risk_source) if spans else None,
        source_heads="spread" if measure.spread and any(span.token_source_attention for span in spans) else None,
        **values,
    )
    return measure.rated(generation)


def require_ability(
    method: str, backend: Backend, capture: CaptureSpec, calibrator: RiskCalibrator | None = None
) -> None:
    """Check that a backend can run a method, and can measure what a calibrator needs."""
    if calibrator is not None and not measures_source(calibrator, backend):
        raise CalibrationError(
            "the calibrator needs the attention of the model on the prompt, which cannot be seen here: the model "
            f"runs with the forward pass {backend.forward_name!r} on the backend {backend.name!r} (see `cocoa info`). "
            "Fit a calibrator on this model as it runs here (cocoa calibrate), or use none."
        )
    if capture.masked and not backend.masks_heads:
        raise UnsupportedModelError(
            f"method={method!r} masks attention heads, which needs a model that uses transformers' AttentionInterface; "
            f"this model runs with the forward pass {backend.forward_name!r} (see `cocoa info`)."
        )


class DecodeTask:
    """A request that is being decoded. Call :meth:`close` afterwards, also after an error.

    Feed ``work`` and call :meth:`advance` until ``work`` is `None`; then fetch the spans with :meth:`ready` and the
    answer with :meth:`generation`.

    Attributes:
        work: what to feed next; `None` once the answer is complete.

    Raises:
        UnsupportedModelError: the method needs an ability that the backend of this model lacks.
        CalibrationError: the calibrator needs the source attention, and the model's attention cannot be seen.
    """

    def __init__(self, request: Request, session: Session, risk: RiskPolicy) -> None:
        request.timeline.started = time.monotonic()
        backend = session.backend  # once for a call: it reads the model's state
        method = METHODS[request.config.method]
        self._request, self._session, self._backend = request, session, backend
        self._measure = risk.measure(request.config, request.passages, backend=backend)
        require_ability(request.config.method, backend, request.capture, self._measure.calibrator)
        # a contrasting method also needs the other logits at the prompt's last token, which is therefore fed as a step
        self._contrasts = isinstance(method, ContrastingMethod)
        prefill = request.prompt[:-1] if self._contrasts else request.prompt
        reserve = request.reserve_tokens + len(request.prompt) - len(prefill)
        (self._tree,) = backend.open([prefill], reserve, request.capture)
        self._tree.passages = request.passages
        if method.reads_back and not self._tree.keeps_rest:
            raise UnsupportedModelError(
                f"method={request.config.method!r} reads the prompt again after every candidate, which needs a model "
                f"whose branches share one cache; this model runs on the backend {backend.name!r} (see `cocoa info`)."
            )
        states = StateReader.of(request.capture, self._measure.calibrator)
        feed = TokenFeed(
            request.prompt,
            Distributions(request.rules, native=backend.native),
            session.runtime.draft_tokens,
            lambda: FREE_LEAVES // max(1, session.scheduler.running),
            backend.cost_of_a_row,
        )
        track = Detokenizer(session.tokens, request.rules.stop_texts)
        self._decoder = SpanDecoder(request.prompt, request.rules, track, feed, self._measure, states)
        self._spans: list[Span] = []
        self._last: list[int] = []  # tokens, in which a loop is looked for
        self._loop: Generator[FeedRequest, StepOutput, None] | None = None
        self.work: Work | None = self._new_work(None if prefill else self._begin(None))

    def _begin(self, first: Tensor | None) -> FeedRequest:
        """Begin the decode loop after the prompt, with the logits after it. Returns what to feed first."""
        self._request.timeline.prompt_read = time.monotonic()
        self._loop = self._decoder.decode(self._tree, None if self._contrasts else first)
        return next(self._loop)

    def _new_work(self, paths: FeedRequest | None) -> Work:
        return Work(self._backend, self._tree, self._request.capture, paths, cancellation=self._request.cancellation)

    def advance(self) -> None:
        """Pass the output of ``work`` to the decode loop and set ``work`` to the next request."""
        done = self.work
        assert done is not None
        if done.error is not None:
            raise done.error
        with self._session.scheduler.user_code():
            try:
                if self._loop is None:
                    paths = self._begin(done.first)
                else:
                    assert done.output is not None
                    paths = self._loop.send(done.output)
            except StopIteration:
                self.work = None
                self._tree.close()
                self._request.timeline.ended = time.monotonic()
                return
        self.work = self._new_work(paths)

    @property
    def prompt_read(self) -> int:
        """The number of prompt tokens that have been fed."""
        return self._tree.prompt_read if self._loop is None else len(self._request.prompt)

    def ready(self) -> list[Span]:
        """The spans that have become final since the last call."""
        decoder, first = self._decoder, len(self._spans)
        ends = [span.token_ends[-1] for span in decoder.decided]
        ranges = decoder.track.final_ranges(ends, first, finished=decoder.has_ended())
        for span, text_range in zip(decoder.decided[first:], ranges, strict=False):
            self._last = [*self._last, *span.token_ids][-LOOP:]
            repeats = is_loop(self._last)
            self._spans.append(complete_span(span, text_range, self._request.config, self._measure, repeats=repeats))
        return self._spans[first:]

    def generation(self) -> Generation:
        """The whole answer. Call it once ``work`` is `None` and :meth:`ready` has returned every span."""
        counts = ("cached_tokens", "forward_passes", "fed_tokens")
        return make_generation(
            self._spans,
            self._request.config,
            self._measure,
            {"prompt_tokens": len(self._request.prompt), **{name: getattr(self._tree, name) for name in counts}},
            model_name=self._session.model_name,
            finish_reason=self._decoder.finish_reason,
            question_tokens=self._request.question_tokens,
        )

    def close(self) -> None:
        """Free the request's memory. Safe to call twice."""
        self._tree.close()


@at_work
def decode_batch(
    requests: Sequence[Request], session: Session, risk: RiskPolicy, batch_size: int, *, keep_errors: bool = False
) -> list[Generation | Exception]:
    """Decode requests, at most ``batch_size`` at a time, in the batch that all calls of the engine share.

    With ``keep_errors``, the error of a running request is its result. Errors of its start and of the scheduler are
    raised in any case.

    Raises:
        ConfigError: ``batch_size`` is not a positive integer.
        EngineBusyError: the queue is full, and none of the requests has started.
        RequestCancelledError: a request was cancelled.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be a whole number, at least 1 (got {batch_size!r})")
    scheduler = session.scheduler
    results: dict[int, Generation | Exception] = {}
    running: dict[int, DecodeTask] = {}
    waiting = deque(enumerate(requests))
    try:
        while waiting or running:
            # the scheduler may refuse only the first request: a later refusal would discard finished answers
            may_refuse = len(waiting) == len(requests)
            while waiting and len(running) < batch_size:
                number, request = waiting[0]
                owner = request.cancellation
                if not scheduler.enter(wait=not running, may_refuse=may_refuse, cancellation=owner, owner=owner):
                    break
                waiting.popleft()
                try:
                    running[number] = DecodeTask(request, session, risk)
                except BaseException:
                    scheduler.leave(owner)
                    raise
            scheduler.feed([task.work for task in running.values() if task.work is not None])
            for number, task in list(running.items()):
                try:
                    task.advance()
                    if task.work is not None:
                        continue
                    task.ready()
                    results[number] = task.generation()
                except Exception as error:
                    if not keep_errors:
                        raise
                    results[number] = error
                del running[number]
                task.close()
                scheduler.leave(requests[number].cancellation)
    finally:
        for number, task in running.items():
            task.close()
            scheduler.leave(requests[number].cancellation)
    return [results[number] for number in range(len(requests))]
