"""Continuous batching: all callers that have tokens to feed share the next forward pass.

The scheduler has no thread of its own. One of the waiting callers runs the pass for all callers that are ready, and the
others sleep until their rows are done. Each request's own code (logits processors, stopping criteria, error handling)
therefore runs in its caller's thread, and no thread remains after the last call.

A pass wakes only the callers whose work it finished, and one that runs the next pass. If it woke all of them, the time
between two passes would grow with the square of their number.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cocoa_engine.errors import EngineBusyError, RequestCancelledError
from cocoa_engine.execution.backends import Backend, FeedRequest, StepOutput, TokenTree
from cocoa_engine.interruptions import Cancellation, free_in_child, require_running, resting
from cocoa_engine.model.language_model import CaptureSpec, plain_modes

PREFILL_CHUNK = 512
"""Number of prompt tokens fed in one pass while other sequences are running. Their steps alternate with the chunks."""

PATIENCE = 0.25
"""Longest wait for callers whose next step is not ready yet, as a share of the last pass's duration."""


@dataclass(eq=False)
class Work:
    """A unit of work for the scheduler: one step of a sequence, or its whole prompt.

    Attributes:
        capture: the hidden states to capture. Only steps with the same spec share a pass.
        paths: what the step feeds; `None` to feed the prompt.
        first: the result for a prompt: the logits ``[V]`` after it. That for a step is ``output``.
        dropped: whether the caller was interrupted or cancelled, and has stopped waiting.
        in_pass: whether it is part of the pass that is running now.
        owner: wakes the caller; set by :meth:`Scheduler.feed`.
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
    owner: Any = None

    @property
    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self.first is not None or self.output is not None or self.error is not None


class Scheduler:
    """Admits sequences to the batch, and runs the batch's passes.

    A free slot goes to the owner that holds the fewest, and otherwise to the one that has waited longest. An owner that
    asks for hundreds of answers at once therefore holds up others by one answer at most.

    Attributes:
        slots: the maximum number of sequences that decode at the same time.
        max_queue: maximum number of calls that wait for a batch slot.
        running: number of sequences that hold a batch slot.
        observers: called with the work of each pass just before it, in the thread that runs it.
    """

    def __init__(self, slots: int, max_queue: int) -> None:
        self.slots = slots
        self.max_queue = max_queue
        self.observers: list[Callable[[Sequence[Work]], None]] = []
        self.patience = PATIENCE
        self.prefill_chunk = PREFILL_CHUNK
        self._guard = free_in_child(threading.Lock())  # guards the next three fields
        self.running = 0
        self._held: Counter[object] = Counter()  # slots by owner
        self._queue: dict[object, deque[threading.Event]] = {}  # by owner, the one that has waited longest first
        self._user_code = threading.local()
        self._turn = free_in_child(threading.RLock())  # guards the fields below
        self._pending: list[Work] = []
        self._leader: threading.Condition | None = None  # of the caller that runs the passes
        self._driving = False  # whether a pass runs
        self._prefilled = False  # whether the last pass was a prefill; steps are next
        self._not_before = 0.0  # time until which the next pass waits for callers that are not ready

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a batch slot."""
        return sum(map(len, tuple(self._queue.values())))

    @property
    def idle(self) -> bool:
        """Whether no batch slot is taken, no call waits and no work is pending."""
        return not (self.running or self._queue or self._pending or self._leader)

    def enter(
        self,
        *,
        wait: bool = True,
        may_refuse: bool = True,
        cancellation: Cancellation | None = None,
        owner: object = None,
    ) -> bool:
        """Take a batch slot for an owner, and wait for one if none is free. Release it with :meth:`leave`.

        Without ``wait``, the result is whether one was free. Without ``may_refuse``, a full queue is no error.

        Raises:
            EngineBusyError: the queue is full.
            RequestCancelledError: the call was cancelled before or during the wait.
        """
        cancellation = cancellation or Cancellation()
        cancellation.check()
        with self._guard:
            # a call by a processor of a request that holds a slot must not wait for that request to end
            nested = getattr(self._user_code, "runs", False)
            if nested or (self.running < self.slots and not self._queue):
                self.running += 1
                self._held[owner] += 1
                return True
            if not wait:
                return False
            if may_refuse and self.waiting >= self.max_queue:
                raise EngineBusyError(
                    f"the engine is busy (requests running: {self.running}, waiting: {self.waiting}); try again "
                    "later, or increase Runtime(max_queue=...) or Runtime(max_batch_size=...)."
                )
            woken = threading.Event()  # when it has left the queue, the call holds a slot
            self._queue.setdefault(owner, deque()).append(woken)
        try:
            with cancellation.heard_by(woken.set), resting():
                woken.wait()
            cancellation.check()
            require_running()
        except BaseException:
            with self._guard:
                waiting = self._queue.get(owner, deque())
                if woken not in waiting:
                    self._give_up(owner)
                else:
                    waiting.remove(woken)
                    if not waiting:
                        del self._queue[owner]
            raise
        return True

    def leave(self, owner: object = None) -> None:
        """Release the batch slot of an owner, which a waiting call gets."""
        with self._guard:
            self._give_up(owner)
        with self._turn:  # a pass that waits for this sequence can run now
            self._hurry()

    def _give_up(self, owner: object) -> None:
        if self._queue and self.running <= self.slots:
            following = min(self._queue, key=self._held.__getitem__)
            waiting = self._queue.pop(following)
            waiting.popleft().set()
            if waiting:
                self._queue[following] = waiting  # behind the others
            self._held[following] += 1
        else:
            self.running -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    @contextmanager
    def slot(
        self, *, may_refuse: bool = True, cancellation: Cancellation | None = None, owner: object = None
    ) -> Iterator[None]:
        """Hold a batch slot within the context; see :meth:`enter`."""
        self.enter(may_refuse=may_refuse, cancellation=cancellation, owner=owner)
        try:
            yield
        finally:
            self.leave(owner)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Enclose a request's processors and criteria. Calls to the engine inside the context do not queue."""
        before = getattr(self._user_code, "runs", False)
        self._user_code.runs = True
        try:
            yield
        finally:
            self._user_code.runs = before

    def feed(self, works: Sequence[Work]) -> None:
        """Run work in passes shared with other callers. Returns when every item has its result or its error.

        Raises:
            RequestCancelledError: the caller was cancelled. Work that is not done yet is dropped.
        """
        woken = threading.Condition(self._turn)
        for work in works:
            work.owner = woken
        with self._turn:
            self._pending.extend(works)
            self._hurry()
            try:
                while not all(work.done for work in works):
                    if not any(work.in_pass for work in works):
                        for work in works:
                            work.cancellation.check()
                    if self._leader is None:
                        self._leader = woken
                    if self._leader is not woken:
                        self._sleep(woken)
                    elif (patience := self._patience()) > 0:
                        self._sleep(woken, patience)
                    else:
                        self._drive()
            except BaseException:  # an interrupt or a cancellation
                for work in works:
                    work.dropped = True  # it may be part of another thread's running pass
                self._pending = [work for work in self._pending if not work.dropped]
                self._hurry()
                raise
            finally:
                if self._leader is woken:
                    self._leader = None
                if self._leader is None and self._pending:
                    self._pending[0].owner.notify()  # leads now, or wakes the next one
        require_running()

    def _sleep(self, woken: threading.Condition, seconds: float | None = None) -> None:
        with resting():
            woken.wait(seconds)

    def _hurry(self) -> None:
        """Wake the caller that waits to run a pass, if nothing is left to wait for."""
        if self._leader is not None and not self._driving and self._patience() <= 0:
            self._leader.notify()

    def _patience(self) -> float:
        """Seconds that the next pass still waits for more callers; 0 or less to run it now."""
        return 0.0 if len(self._pending) >= self.running else self._not_before - time.monotonic()

    def _drive(self) -> None:
        """Run one pass for some of the pending work. The lock is released during the pass."""
        batch = self._pick()
        if not batch:  # all pending work has just been cancelled
            return
        self._driving = True
        for work in batch:
            work.in_pass = True
        self._turn.release()
        start = time.monotonic()
        try:
            for observe in self.observers:
                observe(batch)
            everyone = batch[0].cancellation if len(batch) == 1 else _Everyone(batch)
            everyone.run(run, batch, None if self.running <= 1 else self.prefill_chunk)
        finally:
            self._turn.acquire()
            now = time.monotonic()
            self._not_before = now + self.patience * (now - start)
            self._driving = False
            for work in batch:
                work.in_pass = False
            # at the end of the queue: prompts that are prefilled at the same time take turns
            self._pending += [work for work in batch if not (work.done or work.dropped)]
            for work in [*batch, *self._pending]:
                if work.done or work.cancellation.cancelled:
                    work.owner.notify()

    def _pick(self) -> list[Work]:
        """Remove the work of the next pass from the pending work: one prompt, or the steps that can share a pass.

        Prompts and steps alternate. Cancelled work is skipped, because its caller removes it; the result may be empty.
        """
        ready = [work for work in self._pending if not work.cancellation.cancelled]
        if not ready:
            return []
        prompts = [work for work in ready if work.paths is None]
        steps = [work for work in ready if work.paths is not None]
        self._prefilled = bool(prompts) and not (steps and self._prefilled)
        if self._prefilled:
            batch = prompts[:1]
        else:
            backend, capture = steps[0].backend, steps[0].capture
            batch = [work for work in steps if work.backend is backend and work.capture == capture]
            batch = batch[: backend.max_sequences or self.slots]
        chosen = set(map(id, batch))
        self._pending = [work for work in self._pending if id(work) not in chosen]
        return batch


class _Everyone(Cancellation):
    """That of a pass for several callers: it is cancelled when all of them are."""

    def __init__(self, batch: Sequence[Work]) -> None:
        super().__init__()
        self._batch = batch

    @property
    def cancelled(self) -> bool:
        return all(work.cancellation.cancelled for work in self._batch)


@plain_modes()
def run(batch: Sequence[Work], prefill_chunk: int | None) -> None:
    """Run one pass of one prompt, or of steps with the same backend and capture spec, and store results and errors.

    A failed pass is repeated for each sequence alone, so that only the failing one gets the error. Nothing is stored if
    all callers were cancelled during the pass.
    """
    backend = batch[0].backend
    try:
        if batch[0].paths is None:
            batch[0].first = backend.prefill_some(batch[0].tree, prefill_chunk)
            return
        requests = [(work.tree, work.paths or ()) for work in batch]
        for work, output in zip(batch, backend.step(requests), strict=True):
            work.output = output
    except RequestCancelledError:  # the work is not done, and its callers give it up
        return
    except Exception as error:
        if len(batch) == 1:
            batch[0].error = error
            return
        for work in batch:
            run([work], prefill_chunk)
