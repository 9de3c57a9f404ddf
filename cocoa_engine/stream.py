"""The spans of an answer, each as soon as it is decided."""

import contextlib
import inspect
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any, cast

from cocoa_engine.decoding.request import Request
from cocoa_engine.decoding.task import DecodeTask
from cocoa_engine.errors import RequestCancelledError
from cocoa_engine.execution.session import Session
from cocoa_engine.interruptions import Cancellation, at_work, call_at_end
from cocoa_engine.results import Generation
from cocoa_engine.risk.policy import RiskPolicy
from cocoa_engine.spans import Span

_open: dict[int, "weakref.ref[SpanStream]"] = {}
"""By id, the streams that exist. No finalizers: one that a thread adds or removes meanwhile disturbs those at exit."""


class SpanStream(Iterator[Span]):
    """The spans of an answer, each as soon as it is decided; also a context manager.

    Args:
        session: the model and the scheduler.
        request: the validated request.
        risk: says how risks are computed. It may run the model, with the first span.
    """

    def __init__(self, session: Session, request: Request, risk: RiskPolicy) -> None:
        self._state = _State()
        self._request, self._session = request, session
        self._spans = cast("GeneratorType[Span, None, None]", _decoded(self._state, session, request, risk))
        _open[id(self)] = weakref.ref(self)

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self._request.prompt

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """The number of prompt tokens prefilled so far, and the length of the prompt. Can be read from any thread."""
        task = self._state.task
        return self._state.read if task is None else task.prompt_read, len(self.prompt)

    @property
    def generation(self) -> Generation | None:
        """The whole answer, once its last span is decided; `None` before."""
        return self._state.generation

    @property
    def closed(self) -> bool:
        """Whether the stream was closed, or its call cancelled."""
        return self._state.closing.cancelled

    def __next__(self) -> Span:
        self._session.require_process()
        with at_work:
            span = next(self._spans)
        if self.closed:  # by another thread, which cannot close the generator while it runs
            self.close()
            self._request.cancellation.check()
            raise StopIteration
        return span

    def close(self) -> None:
        """Stop decoding. The stream yields no more spans.

        Can be called from any thread, even while another thread waits for a span. The waiting call ends before its next
        forward pass, or at once if it is still queued.
        """
        self._state.closing.cancel()
        if inspect.getgeneratorstate(self._spans) == inspect.GEN_CLOSED:  # it has ended
            return
        with contextlib.suppress(ValueError):  # another thread runs the generator, which sees `closing`
            self._spans.close()

    def __del__(self, streams: dict[int, Any] = _open) -> None:  # a default: modules may have been cleared
        streams.pop(id(self), None)
        if self._spans.gi_frame is not None:
            self.close()

    def __enter__(self) -> "SpanStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class _State:
    """The state that a stream and its generator share. It is separate so that abandoned streams are freed at once."""

    generation: Generation | None = None
    task: DecodeTask | None = None  # while it runs
    read: int = 0  # tokens of the prompt, once the task is closed
    closing: Cancellation = field(default_factory=Cancellation)


def _close_open() -> None:
    """Close the streams that are open when the process ends: when modules are cleared, they no longer can be."""
    for reference in list(_open.values()):
        if (stream := reference()) is not None:
            stream.close()


call_at_end(_close_open)


def _decoded(state: _State, session: Session, request: Request, risk: RiskPolicy) -> Generator[Span, None, None]:
    """Decode one request. It has a batch slot only while a span is requested. It ends if the stream is closed."""
    task: DecodeTask | None = None
    try:
        with request.cancellation.heard_by(state.closing.cancel):
            while task is None or task.work is not None:
                with session.scheduler.slot(
                    may_refuse=task is None, cancellation=state.closing, owner=request.cancellation
                ):
                    if task is None:
                        task = state.task = DecodeTask(replace(request, cancellation=state.closing), session, risk)
                    spans: list[Span] = []
                    while not spans and task.work is not None:
                        session.scheduler.feed([task.work])
                        task.advance()
                        spans = task.ready()
                if task.work is None:
                    state.generation = task.generation()
                    risk.warn_of_domain(state.generation.out_of_domain)
                yield from spans
    except RequestCancelledError:
        if request.cancellation.cancelled or not state.closing.cancelled:
            raise
    finally:
        if task is not None:
            state.read, state.task = task.prompt_read, None
            task.close()
