"""The former name of :mod:`cocoa_engine.datasets`. Its public names still work here, with a warning."""

from __future__ import annotations

import warnings
from typing import Any

from cocoa_engine import datasets


def __getattr__(name: str) -> Any:
    if name not in datasets.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"cocoa_engine.labelled is now cocoa_engine.datasets: import {name} from there.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(datasets, name)


def __dir__() -> list[str]:
    return sorted(datasets.__all__)
