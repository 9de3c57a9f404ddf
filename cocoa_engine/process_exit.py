"""What the end of the process needs: no thread inside C++ code.

Before 3.14, Python ends a daemon thread as the thread comes back for the interpreter's lock, which unwinds its stack.
If torch's C++ functions are on it, the C++ runtime aborts the process. An exit hook therefore lets the passes that are
running end, and :data:`at_work` lets no further one begin: daemon threads end there, and other callers get an error.

Python has joined all other threads before it calls exit hooks. Hooks run in reverse order of registration: those that
were registered after the import of this module can still use an engine.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager

from cocoa_engine.errors import RequestCancelledError
from cocoa_engine.forks import call_in_child

LONGEST_PASS = 10.0
"""Seconds that the exit hook waits, at most, for threads at work. It does not wait if there are none."""

_depths: dict[int, int] = {}  # by thread at work: number of contexts that it is in; a thread writes its own entry only
_ending = False


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


def _end_work() -> None:
    global _ending
    _ending = True
    deadline = time.monotonic() + LONGEST_PASS
    while _depths.keys() - {threading.get_ident()} and time.monotonic() < deadline:
        time.sleep(0.001)


def _forget_other_threads() -> None:
    for thread in _depths.keys() - {threading.get_ident()}:
        del _depths[thread]


# First the hook of finalizers is registered, which then runs after ours: it fails if a thread adds one meanwhile.
weakref.finalize(_AtWork, bool).atexit = False
atexit.register(_end_work)
call_in_child(_forget_other_threads)
