"""Python's garbage collector during the imports of torch and transformers, which make about a million objects.

The collector looks at them again and again while they are made, and frees nearly none: a quarter of the time of these
imports.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OF_COMMANDS = (50_000, 10, 10)
"""Thresholds of the collector for a process that runs one command."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector. What was made meanwhile then counts as old, so that it is not looked at right afterwards.

    Without effect if the collector is off.
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
