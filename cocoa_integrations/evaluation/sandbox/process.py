"""What worker and judge have in common: their start, their imports and their confinement."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from . import confinement, hook

_LAZY = (  # what functions of built-in modules import when they are called, at which time no file can be opened
    "_pylong", "_strptime", "heapq", "locale", "struct", "types", "unicodedata", "weakref", "encodings.ascii",
    "encodings.cp1252", "encodings.hex_codec", "encodings.idna", "encodings.latin_1", "encodings.rot_13",
    "encodings.utf_16",
)  # fmt: skip


def silence() -> None:
    """Connect the standard streams to the null device."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.close(quiet)
    warnings.simplefilter("ignore")


def confine(modules: Sequence[str], *, seconds: float, memory_mb: int, confined: bool) -> None:
    """Import modules of the standard library, and then confine this process.

    Args:
        modules: the modules that will be needed.
        seconds: CPU time.
        memory_mb: address space.
        confined: install the filter of system calls. Otherwise the process gets an audit hook, which prevents only
            accidents.

    Raises:
        ConfinementError: the filter cannot be installed.
    """
    for name in (*_LAZY, *modules):
        with contextlib.suppress(Exception):  # the code gets the error when it imports the module
            importlib.import_module(name)
    warnings.simplefilter("ignore")
    confinement.limit(seconds, memory_mb)
    if confined:
        confinement.filter_system_calls()
    else:
        hook.add()


def reason_of(error: BaseException) -> tuple[str, str]:
    """The type and the message of an error, in one line."""
    try:
        message = " ".join(str(error).split())[:500]
    except BaseException:  # of a class that the code defines
        message = ""
    return type(error).__name__[:100], message


def probe() -> None:
    """Confine this process by its filter alone. Exits with status 0 if that works."""
    confinement.filter_system_calls()
    sys.exit(0)
