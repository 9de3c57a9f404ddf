"""Cancelling calls from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cocoa_engine.errors import RequestCancelledError
from cocoa_engine.forks import free_in_child


class Cancellation:
    """Cancels the calls it is passed to: ``engine.generate(prompt, cancellation=cancellation)``.

    A waiting call leaves the queue. A running call ends before its next forward pass.
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
        """Raise an error if :meth:`cancel` was called.

        Raises:
            RequestCancelledError: the calls are cancelled.
        """
        if self._cancelled:
            raise RequestCancelledError("the call was cancelled")

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
