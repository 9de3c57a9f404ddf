"""Packages that only some features need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cocoa_engine.errors import MissingExtraError


def need(module: str, *, extra: str, what: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: its name.
        extra: the extra of this package that installs it.
        what: what needs it, for the message.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name.partition(".")[0]):
            raise
        raise MissingExtraError(
            f"{what} needs the package {error.name}: pip install 'cocoa-integrations[{extra}]'."
        ) from None
