"""Gives memory that was freed back to the system."""

from __future__ import annotations

import ctypes


def release_free_memory() -> bool:
    """Give memory that was freed back to the system: glibc keeps it, and does not use gaps again for torch's tensors.

    It takes a few milliseconds, during which no thread gets memory of the arena that is searched.

    Returns:
        Whether any was given back. It is not with another C library.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, TypeError, AttributeError):  # no such library (Windows: TypeError), or no such function
        return False
