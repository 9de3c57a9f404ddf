"""Telling a call, from another thread, that nobody waits for its answer any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cocoa_engine.errors import RequestCancelledError


class Cancellation:
    """Ends the calls that were given it: ``engine.generate(prompt, cancellation=cancellation)``.

    A call that waits leaves the queue; one that runs ends before its next forward pass.
    """

    def __init__(self) -> None:
        # again by one thread, if it collects a stream that listens
        self._guard = threading.RLock()
        self._cancelled = False
        self._listeners: dict[object, Callable[[], None]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """End the calls. Any thread may do so, and more than once; it does not wait for them."""
        with self._guard:
            self._cancelled = True
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener()

    def check(self) -> None:
        """Go on only if nobody cancelled.

        Raises:
            RequestCancelledError: somebody did.
        """
        if self._cancelled:
            raise RequestCancelledError("the call was cancelled")

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """While the block runs, call ``listener`` as soon as the calls are cancelled; now, if they are already."""
        key = object()
        with self._guard:
            cancelled = self._cancelled
            if not cancelled:
                self._listeners[key] = listener
        if cancelled:
            listener()
        try:
            yield
        finally:
            with self._guard:
                self._listeners.pop(key, None)
