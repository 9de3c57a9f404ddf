"""Cancelling calls from another thread."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from cocoa_engine.errors import RequestCancelledError
from cocoa_engine.forks import free_in_child

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
