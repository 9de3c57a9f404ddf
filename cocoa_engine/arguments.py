"""Checks what callers pass in: a wrong argument ends in one of this package's errors, before any work."""

from __future__ import annotations

from typing import TypeVar

from cocoa_engine.errors import ConfigError

T = TypeVar("T")


def of_type(given: T, kind: type[T], name: str) -> T:
    """The argument as it is, if it has its type.

    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(given, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, not {type(given).__name__}.")
    return given


def given_or_new(given: T | None, kind: type[T], name: str) -> T:
    """The argument as it is; for `None`, a new object of its type.

    Raises:
        ConfigError: it is of another type.
    """
    return kind() if given is None else of_type(given, kind, name)
