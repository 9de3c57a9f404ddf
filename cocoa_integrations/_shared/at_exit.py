"""Closes the generators of streams that are still open when the process ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def closed_at_exit(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Close the generator that a method returns when the process ends.

    Otherwise Python closes it after it has cleared the modules that a framework's generator uses on closing, and prints
    a traceback.
    """

    @wraps(method)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        made = method(*args, **kwargs)
        if isinstance(made, Generator):
            weakref.finalize(made, _close, weakref.ref(made))
        return made

    return wrapped


def _close(generator: weakref.ref[Generator[Any, Any, Any]]) -> None:
    if (alive := generator()) is not None:
        with suppress(ValueError):  # a thread runs it
            alive.close()
