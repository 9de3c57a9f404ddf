"""One continuous batch for all callers: whoever has tokens to feed shares the next forward pass.

There is no thread of its own. Callers that wait for the model take turns at driving it: one runs the pass for all that
are ready, the others sleep until their rows are done. So each request's own code (logits processors, stopping criteria,
errors) runs in its own caller's thread, and nothing is left behind when the callers are gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cocoa_engine.cancellation import Cancellation
from cocoa_engine.errors import EngineBusyError
from cocoa_engine.execution.backends import Backend, FeedRequest, StepOutput, TokenTree

_SHARED_PREFILL = 512
"""Tokens of a prompt fed between two steps while other sequences wait for theirs."""

_PATIENCE = 0.25
"""Of a pass's time: how long it is held back for callers that have not said yet what they feed next."""


@dataclass(eq=False)
class Work:
    """Something to feed: the paths of a step, or the prompt where there are none.

    Attributes:
        wanted: which hidden states are asked for; only alike ones share a pass.
        first: of a prompt, the logits ``[V]`` after it.
        output: of a step.
        error: what the pass raised instead.
        cancellation: its caller's.
        dropped: its caller was interrupted or cancelled; nobody waits for it any more.
        in_pass: it is being fed just now.
    """

    backend: Backend
    tree: TokenTree
    wanted: Any
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


class Scheduler:
    """Places in the batch, first come first served, and the turns at driving it.

    Args:
        places: sequences that decode at the same time.
        max_queue: calls that may wait for a place.
    """

    def __init__(self, places: int, max_queue: int) -> None:
        self.places = places
        self.max_queue = max_queue
        self._guard = threading.Lock()  # of the places
        self._taken = 0
        self._queue: deque[threading.Event] = deque()
        self._own_code = threading.local()
        self._turn = threading.Condition()  # of the batch
        self._pending: list[Work] = []
        self._driving = False
        self._prefilled = False  # the last pass was a prompt's: steps are next
        self._not_before = 0.0  # until when the next pass is held back for callers that are not ready
        self._duration = 0.0  # of the last pass, in seconds

    @property
    def running(self) -> int:
        """Sequences that hold a place."""
        return self._taken

    def enter(self, *, wait: bool = True, may_refuse: bool = True, cancellation: Cancellation | None = None) -> bool:
        """Take a place; false if there is none and ``wait`` is off.

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
            # from a processor of a request that holds a place itself: waiting for that, it would wait for ever
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
            woken = threading.Event()  # off the queue, it was given a place
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
        """Give a place to whoever has waited longest."""
        with self._guard:
            self._give_up()
        with self._turn:  # a pass that was held back for this place need not wait any longer
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
        """While a request's processors or criteria run: what they ask of the engine does not queue."""
        before = getattr(self._own_code, "runs", False)
        self._own_code.runs = True
        try:
            yield
        finally:
            self._own_code.runs = before

    def feed(self, works: Sequence[Work]) -> None:
        """Have some work done, together with what other callers wait for. Each has its result, or its error, then.

        Raises:
            RequestCancelledError: the caller was cancelled. No pass feeds any of its work then.
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
        """For how long the next pass is held back, in seconds."""
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
            run(batch, alone=self._taken <= 1)
        finally:
            self._turn.acquire()
            now = time.monotonic()
            self._duration = now - start
            self._not_before = now + _PATIENCE * self._duration
            self._driving = False
            for work in batch:
                work.in_pass = False
            # behind what waits: prompts that are read at the same time take turns
            self._pending += [work for work in batch if not (work.done or work.dropped)]
            self._turn.notify_all()

    def _pick(self) -> list[Work]:
        """The next pass, taken off what is pending: a piece of one prompt, or steps of all that are alike.

        None of work that was cancelled, whose caller will take it away; so it may be empty.
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
            alike = [work for work in steps if work.backend is first.backend and work.wanted == first.wanted]
            batch = alike[: first.backend.max_sequences or self.places]
        self._pending = [work for work in self._pending if work not in batch]
        return batch


def run(batch: Sequence[Work], *, alone: bool) -> None:
    """Run one pass. A pass that fails is run again row by row: only the row that cannot be run has the error."""
    backend = batch[0].backend
    try:
        if batch[0].paths is None:
            batch[0].first = backend.prefill_some(batch[0].tree, None if alone else _SHARED_PREFILL)
            return
        requests = [(work.tree, work.paths or ()) for work in batch]
        for work, output in zip(batch, backend.step(requests), strict=True):
            work.output = output
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        for work in batch:
            run([work], alone=False)
