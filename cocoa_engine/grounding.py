"""The former module of the context lift, which is now in :mod:`cocoa_engine` itself. Its names warn."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

_NAMES = ("ContextLift", "context_lift", "context_lift_of_text")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"cocoa_engine.grounding is now a part of cocoa_engine: import {name} from there.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module("cocoa_engine"), name)


def __dir__() -> list[str]:
    return sorted(_NAMES)
