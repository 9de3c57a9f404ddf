"""How the C library's allocator keeps memory that a server has freed.

By default glibc has up to eight arenas for each core. Each keeps what its threads have freed, and grows until it has
seen the largest work once, so that the memory of a server grows for a long time. With one arena it grows less, and
what is free there is given back every few seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from cocoa_engine.free_memory import release_free_memory

_ARENA_MAX = -8
"""``M_ARENA_MAX`` of glibc's ``malloc.h``."""

_VARIABLE = "MALLOC_ARENA_MAX"

RELEASE_INTERVAL = 10.0
"""Seconds between two releases of free memory."""


def keep_one_arena(environment: Mapping[str, str] = os.environ) -> bool:
    """Let all threads of this process share one arena of glibc's allocator.

    Call this before there are threads: arenas that exist remain.

    Args:
        environment: of this process. Where it sets glibc's allocator, that is left as it is.

    Returns:
        Whether it was done. It is not with another C library.
    """
    if _is_set(environment):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # another library's mallopt has other numbers
        return bool(library.mallopt(_ARENA_MAX, 1))
    except (OSError, TypeError, AttributeError):  # no such library (Windows: TypeError), or no such function
        return False


def one_arena(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a new process has one arena of glibc's allocator.

    Args:
        environment: of this process. Where it sets glibc's allocator, there are none.
    """
    return {} if _is_set(environment) else {_VARIABLE: "1"}


@asynccontextmanager
async def free_memory_released(
    interval: float = RELEASE_INTERVAL, environment: Mapping[str, str] = os.environ
) -> AsyncIterator[None]:
    """Within the context, give memory that was freed back to the system every few seconds.

    Args:
        interval: seconds between two releases.
        environment: of this process. Where it sets glibc's allocator otherwise than this module, that is left as it is.
    """
    if _is_set(dict(environment.items() - one_arena({}).items())):
        yield
        return
    task = asyncio.create_task(_release(interval))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _release(interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        await asyncio.to_thread(release_free_memory)


def _is_set(environment: Mapping[str, str]) -> bool:
    """Whether the user has set glibc's allocator."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in environment)
