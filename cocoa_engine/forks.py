"""What a forked child process needs: locks that no thread holds, and OpenMP threads of its own.

A fork copies only the thread that calls it. Locks that other threads hold stay locked in the child, and GNU's OpenMP
runtime waits for threads that do not exist there. An engine cannot be used in a child, because its state may be in the
middle of a change. The child can load an engine of its own, and can free or close what it inherited.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

from cocoa_engine.errors import ForkedProcessError

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
