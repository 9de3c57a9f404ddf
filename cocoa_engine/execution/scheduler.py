"""One continuous batch for all callers: every caller that has tokens to feed shares the next forward pass.

The scheduler has no thread of its own. Callers that wait for the model take turns at driving it: one runs the pass for
all that are ready, the others sleep until their rows are done. So each request's own code (logits processors, stopping
criteria, errors) runs in its caller's thread, and no thread remains when the callers are gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.errors import EngineBusyError
from cocoa_engine.execution.backends import Backend, FeedRequest, StepOutput, TokenTree
from cocoa_engine.model.hidden_states import CaptureSpec

PREFILL_CHUNK = 512
"""Tokens of a prompt fed between two steps while other sequences wait for theirs."""

PATIENCE = 0.25
"""How long a pass waits for callers that have not yet asked for their next step, as a share of the last pass."""


@dataclass(eq=False)
class Work:
    """Something to feed: the paths of a step, or the prompt if there are none.

    Attributes:
        capture: the hidden states that are captured; only work with the same spec shares a pass.
        first: of a prompt, the logits ``[V]`` after it.
        output: of a step.
        error: what the pass raised instead.
        cancellation: the caller's.
        dropped: the caller was interrupted or cancelled, and does not wait any more.
        in_pass: it is being fed at the moment.
    """

    backend: Backend
    tree: TokenTree
    capture: CaptureSpec
    paths: FeedRequest | None = None
    first: Tensor | None = None
    output: StepOutput | None = None
    error: Exception | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)
    dropped: bool = False
    in_pass: bool = False

    @property
    def done(self) -> bool:
        return self.first is not None or self.output is not None or self.error is not None


@dataclass(frozen=True)
class PassEvent:
    """A forward pass that is about to run.

    Attributes:
        kind: whether a piece of a prompt is fed, or a step of the sequences in ``trees``.
        trees: the sequences that take part.
        requests: what each of them feeds; empty for a prompt.
    """

    kind: Literal["prefill", "step"]
    trees: Sequence[TokenTree]
    requests: Sequence[FeedRequest]


class Scheduler:
    """Places in the batch, first come first served, and the turns at driving it.

    Args:
        places: sequences that decode at the same time.
        max_queue: calls that may wait for a place.

    Attributes:
        observers: called with each pass, in the thread that runs it, just before it runs.
        patience: see :data:`PATIENCE`.
        prefill_chunk: see :data:`PREFILL_CHUNK`.
    """

    def __init__(self, places: int, max_queue: int) -> None:
        self.places = places
        self.max_queue = max_queue
        self.observers: list[Callable[[PassEvent], None]] = []
        self.patience = PATIENCE
        self.prefill_chunk = PREFILL_CHUNK
        self._guard = threading.Lock()  # of the places
        self._taken = 0
        self._queue: deque[threading.Event] = deque()
        self._own_code = threading.local()
        self._turn = threading.Condition()  # of the batch
        self._pending: list[Work] = []
        self._driving = False
        self._prefilled = False  # the last pass was a prompt's: steps are next
        self._not_before = 0.0  # until when the next pass waits for callers that are not ready
        self._duration = 0.0  # of the last pass, in seconds

    @property
    def running(self) -> int:
        """How many sequences hold a place."""
        return self._taken

    @property
    def waiting(self) -> int:
        """How many calls wait for a place."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether no place is held, no call waits and nothing is to be fed."""
        return not (self._taken or self._queue or self._pending or self._driving)

    def enter(self, *, wait: bool = True, may_refuse: bool = True, cancellation: Cancellation | None = None) -> bool:
        """Take a place; returns false if there is none and ``wait`` is off.

        Args:
            may_refuse: refuse the call if the queue is full.
            cancellation: ends the waiting.

        Raises:
            EngineBusyError: too many calls wait already.
            RequestCancelledError: the call was cancelled, before or while it waited.
        """
        cancellation = cancellation or Cancellation()
        cancellation.check()
        with self._guard:
            # called by a processor of a request that holds a place itself: it would wait for itself
            nested = getattr(self._own_code, "runs", False)
            if nested or (self._taken < self.places and not self._queue):
                self._taken += 1
                return True
            if not wait:
                return False
            if may_refuse and len(self._queue) >= self.max_queue:
                raise EngineBusyError(
                    f"requests running: {self._taken}, waiting: {len(self._queue)}, as many as may; try again later, "
                    "or raise Runtime(max_queue=...) or Runtime(max_batch_size=...)."
                )
            woken = threading.Event()  # once it is off the queue, it was given a place
            self._queue.append(woken)
        try:
            with cancellation.heard_by(woken.set):
                woken.wait()
            cancellation.check()
        except BaseException:
            with self._guard:
                if woken in self._queue:
                    self._queue.remove(woken)
                else:
                    self._give_up()
            raise
        return True

    def leave(self) -> None:
        """Give the place to the call that has waited longest."""
        with self._guard:
            self._give_up()
        with self._turn:  # a pass that waits for this place can run
            self._turn.notify_all()

    def _give_up(self) -> None:
        if self._queue and self._taken <= self.places:
            self._queue.popleft().set()
        else:
            self._taken -= 1

    @contextmanager
    def place(self, *, may_refuse: bool = True, cancellation: Cancellation | None = None) -> Iterator[None]:
        """Hold a place; see :meth:`enter`."""
        self.enter(may_refuse=may_refuse, cancellation=cancellation)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def own_code(self) -> Iterator[None]:
        """While a request's processors or criteria run, calls that they make to the engine do not queue."""
        before = getattr(self._own_code, "runs", False)
        self._own_code.runs = True
        try:
            yield
        finally:
            self._own_code.runs = before

    def feed(self, works: Sequence[Work]) -> None:
        """Run some work together with that of other callers. Each has its result or its error afterwards.

        Raises:
            RequestCancelledError: the caller was cancelled. None of its work is fed then.
        """
        with self._turn:
            self._pending.extend(works)
            self._turn.notify_all()
            try:
                while not all(work.done for work in works):
                    if not any(work.in_pass for work in works):
                        for work in works:
                            work.cancellation.check()
                    if self._driving:
                        self._turn.wait()
                    elif (patience := self._patience()) > 0:
                        self._turn.wait(patience)
                    else:
                        self._drive()
            except BaseException:  # an interrupt or a cancellation
                for work in works:
                    work.dropped = True  # one may be in another thread's pass just now
                self._pending = [work for work in self._pending if not work.dropped]
                self._turn.notify_all()
                raise

    def _patience(self) -> float:
        """How long the next pass waits for more callers, in seconds."""
        return 0.0 if len(self._pending) >= self._taken else self._not_before - time.monotonic()

    def _drive(self) -> None:
        """Run one pass for some of what is pending; the lock is free meanwhile."""
        batch = self._pick()
        if not batch:  # all was cancelled a moment ago
            return
        self._driving = True
        for work in batch:
            work.in_pass = True
        self._turn.release()
        start = time.monotonic()
        try:
            for observe in self.observers:
                observe(_event(batch))
            run(batch, None if self._taken <= 1 else self.prefill_chunk)
        finally:
            self._turn.acquire()
            now = time.monotonic()
            self._duration = now - start
            self._not_before = now + self.patience * self._duration
            self._driving = False
            for work in batch:
                work.in_pass = False
            # at the end of the queue: prompts that are prefilled at the same time take turns
            self._pending += [work for work in batch if not (work.done or work.dropped)]
            self._turn.notify_all()

    def _pick(self) -> list[Work]:
        """The next pass, removed from the pending work: a piece of one prompt, or the steps that can share a pass.

        Cancelled work is left out, since its caller removes it; so the pass may be empty.
        """
        wanted = [work for work in self._pending if not work.cancellation.cancelled]
        if not wanted:
            return []
        prompts = [work for work in wanted if work.paths is None]
        steps = [work for work in wanted if work.paths is not None]
        self._prefilled = bool(prompts) and not (steps and self._prefilled)
        if self._prefilled:
            batch = prompts[:1]
        else:
            first = steps[0]
            alike = [work for work in steps if work.backend is first.backend and work.capture == first.capture]
            batch = alike[: first.backend.max_sequences or self.places]
        self._pending = [work for work in self._pending if work not in batch]
        return batch


def _event(batch: Sequence[Work]) -> PassEvent:
    requests = [work.paths for work in batch if work.paths is not None]
    return PassEvent("step" if requests else "prefill", [work.tree for work in batch], requests)


def run(batch: Sequence[Work], prefill_chunk: int | None) -> None:
    """Run one pass. A pass that fails is repeated for each sequence alone, so that only the failing one has the error.

    Args:
        prefill_chunk: how many tokens of a prompt to feed; `None` feeds as many as the backend does at once.
    """
    backend = batch[0].backend
    try:
        if batch[0].paths is None:
            batch[0].first = backend.prefill_some(batch[0].tree, prefill_chunk)
            return
        requests = [(work.tree, work.paths or ()) for work in batch]
        for work, output in zip(batch, backend.step(requests), strict=True):
            work.output = output
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        for work in batch:
            run([work], prefill_chunk)
