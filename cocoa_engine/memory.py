"""Imports of large packages, without their log messages and without collecting garbage; memory that was freed."""

import ctypes
import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

OF_COMMANDS = (50_000, 10, 10)  # thresholds of the collector for a process that runs one command


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, unless it is off, during the imports of torch and transformers, whose time it would add to.

    What was made meanwhile then counts as old, so that it is not looked at right afterwards.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # otherwise this would thaw what the program has frozen
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Suppress the log messages of torchao while it is imported.

    transformers imports torchao with its model classes, wherever it is installed. Its warnings, about kernels for other
    machines, do not concern a model that is not quantised.
    """

    def drop(record: logging.LogRecord) -> bool:
        return False

    with ExitStack() as stack:
        for name in ("torchao", "torch.utils._pytree"):
            logger = logging.getLogger(name)  # noqa: TID251 - of another package
            logger.addFilter(drop)
            stack.callback(logger.removeFilter, drop)
        yield


def release_free_memory() -> bool:
    """Give memory that was freed back to the system: glibc keeps it, and does not use gaps again for torch's tensors.

    It takes a few milliseconds, during which no thread gets memory of the arena that is searched. Returns whether any
    was given back. It is not with another C library.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, TypeError, AttributeError):  # no such library (Windows: TypeError), or no such function
        return False
