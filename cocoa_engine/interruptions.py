"""What may end the work of a call: a cancellation from another thread, a fork of the process, and its end.

A fork copies only the thread that calls it. Locks that other threads hold stay locked in the child, and GNU's OpenMP
runtime waits for threads that do not exist there. An engine cannot be used in a child, because its state may be in the
middle of a change. The child can load an engine of its own, and can free or close what it inherited.

At the end, no thread may be inside C++ code. Before 3.14, Python ends a daemon thread as the thread comes back for the
interpreter's lock, which unwinds its stack. If torch's C++ functions are on it, the C++ runtime aborts the process. An
exit hook therefore lets the passes that are running end, and :data:`at_work` lets no further one begin: daemon threads
end there, and other callers get an error.

Python has joined all other threads before it calls exit hooks. Hooks run in reverse order of registration: those that
were registered after the import of this module can still use an engine.
"""

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from cocoa_engine.errors import ForkedProcessError, RequestCancelledError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_GRACE = 0.3  # seconds that an interruptible function has to end by itself: nearly all do
_current: "ContextVar[Cancellation | None]" = ContextVar("cocoa_cancellation", default=None)


class Cancellation:
    """Cancels the calls it is passed to: ``engine.generate(prompt, cancellation=cancellation)``.

    A waiting call leaves the queue. A running call ends before the next layer of its forward pass. What comes before
    and after the passes ends too: the chat template, the compilation of a grammar, and the comparison of an answer with
    a schema.
    """

    def __init__(self) -> None:
        # reentrant, because garbage collection of a listening stream may run in the thread that holds the lock
        self._lock = free_in_child(threading.RLock())
        self._cancelled = False
        self._listeners: dict[object, Callable[[], None]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the calls without waiting for them. Can be called from any thread, and repeatedly."""
        with self._lock:
            self._cancelled = True
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener()

    def check(self) -> None:
        """Raise a RequestCancelledError if :meth:`cancel` was called."""
        if self.cancelled:
            raise RequestCancelledError("the call was cancelled")

    def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Call a function. Work in it that has no cancellation of its own, such as rendering, ends with this one.

        Raises:
            RequestCancelledError: :meth:`cancel` was called before or during such work.
        """
        before = _current.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(before)

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Within the block, call ``listener`` when :meth:`cancel` is called, or at once if it was called before."""
        key = object()
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                self._listeners[key] = listener
        if cancelled:
            listener()
        try:
            yield
        finally:
            with self._lock:
                self._listeners.pop(key, None)


def check_current() -> None:
    """:meth:`Cancellation.check` of the innermost :meth:`Cancellation.run` around the calling code."""
    if (cancellation := _current.get()) is not None:
        cancellation.check()


def current_cancellation() -> Cancellation:
    """That of the innermost :meth:`Cancellation.run` around the calling code; otherwise a new one."""
    return _current.get() or Cancellation()


class _Interrupt(BaseException):
    """Raised in a thread by another one. No `except Exception` stops it."""


def interruptible(function: Callable[[], Result], seconds: float) -> Result:
    """Call a function that another thread ends if the calling code is cancelled, or after a time.

    The function ends between two instructions of Python. It must hold nothing that an interrupt would leave half done.

    Raises:
        RequestCancelledError: the calling code was cancelled.
        TimeoutError: the time is over.
    """
    cancellation, thread, lock = current_cancellation(), threading.get_ident(), threading.Lock()
    state, raised = "before", False
    timers: list[threading.Timer] = []

    def interrupt() -> None:
        nonlocal state
        with lock:
            if state == "before":
                start(_GRACE)
            elif state == "during":
                state = "interrupted"
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interrupt))

    def start(after: float) -> None:
        timer = threading.Timer(after, interrupt)
        timer.daemon = True
        timer.start()
        timers.append(timer)

    cancellation.check()
    start(seconds)
    with cancellation.heard_by(lambda: start(_GRACE)):
        try:
            try:
                state = "during"
                return function()
            except _Interrupt:
                raised = True
                raise
            finally:
                with lock:
                    state = "after" if state == "during" else state
                while state == "interrupted" and not raised:  # it is raised here at the latest
                    time.sleep(0)
        except _Interrupt:
            cancellation.check()
            raise TimeoutError from None
        finally:
            for timer in timers:
                timer.cancel()


LockT = TypeVar("LockT")

_locks: WeakSet[Any] = WeakSet()
_HARD = 2  # omp_pause_hard: end the threads; the next parallel region starts new ones


def free_in_child(lock: LockT) -> LockT:
    """Return a lock or condition of ``threading``, which is then free in every forked child."""
    _locks.add(lock)
    return lock


def call_in_child(function: Callable[[], object]) -> None:
    """Call a function in every forked child, before any other code runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def require_process(process: int) -> None:
    """Raise a :class:`.ForkedProcessError` in a forked child of the process in which an engine was loaded."""
    if os.getpid() != process:
        raise ForkedProcessError(
            f"this engine was loaded before the process forked (in process {process}; this is {os.getpid()}), and "
            "cannot be used in the child. Load it after the fork (gunicorn: without --preload, or in post_fork; "
            "Celery: in worker_process_init), or start processes with multiprocessing.get_context('spawn')."
        )


def _end_openmp_threads() -> None:
    """Before a fork: end the OpenMP threads of the calling thread. They start again in both processes when needed."""
    if "torch" in sys.modules:
        with contextlib.suppress(AttributeError, OSError):  # another OpenMP runtime
            ctypes.CDLL(None).omp_pause_resource_all(_HARD)


def _free_locks() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


if sys.platform == "linux":
    os.register_at_fork(before=_end_openmp_threads)
call_in_child(_free_locks)


LONGEST_PASS = 10.0
"""Seconds that the exit hook waits, at most, for threads at work. It does not wait if there are none."""

_depths: dict[int, int] = {}  # by thread at work: number of contexts that it is in; a thread writes its own entry only
_ending = False
_last_calls: list[Callable[[], object]] = []


class _AtWork(ContextDecorator):
    """Encloses code that runs torch, on behalf of a caller, if :func:`require_running` allows. May be nested."""

    def __enter__(self) -> None:
        thread = threading.get_ident()
        before = _depths.get(thread, 0)
        _depths[thread] = before + 1  # before the check: either it fails, or the exit hook sees the thread
        try:
            require_running()
        except BaseException:
            _restore(thread, before)
            raise

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        _restore(thread, _depths.get(thread, 0) - 1)


at_work = _AtWork()


@contextmanager
def resting() -> Iterator[None]:
    """Enclose a wait for other threads inside :data:`at_work`: the exit hook does not wait for this one meanwhile.

    Call :func:`require_running` afterwards, as soon as no lock is held.
    """
    thread = threading.get_ident()
    depth = _depths.pop(thread, 0)
    try:
        yield
    finally:
        _restore(thread, depth)


def require_running() -> None:
    """Raise an error if the process is ending: RequestCancelledError, in a daemon thread a silent SystemExit."""
    if not _ending:
        return
    if threading.current_thread().daemon:
        raise SystemExit
    raise RequestCancelledError(
        "the process is ending: the engine runs no more forward passes. Register exit hooks that use an engine after "
        "it is made."
    )


def _restore(thread: int, depth: int) -> None:
    if depth > 0:
        _depths[thread] = depth
    else:
        _depths.pop(thread, None)


def call_at_end(function: Callable[[], object]) -> None:
    """Call a function when the process ends and no thread is at work any more."""
    _last_calls.append(function)


def _end_work() -> None:
    global _ending
    _ending = True
    deadline = time.monotonic() + LONGEST_PASS
    while _depths.keys() - {threading.get_ident()} and time.monotonic() < deadline:
        time.sleep(0.001)
    for function in _last_calls:
        function()


def _forget_other_threads() -> None:
    for thread in _depths.keys() - {threading.get_ident()}:
        del _depths[thread]


# First the hook of finalizers is registered, which then runs after ours: it fails if a thread adds one meanwhile.
weakref.finalize(_AtWork, bool).atexit = False
atexit.register(_end_work)
call_in_child(_forget_other_threads)
