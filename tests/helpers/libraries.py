"""Libraries of changed sources, and a process that remembers nothing of the kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from cocoa_engine.execution.native import build, operators, trial

QUICK_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS)
"""Kernels that compute the same, slowly, but compile sooner."""


def forget() -> None:
    """As if nothing had been built or tried in this process."""
    for remembered in (build._built, operators.handle, trial.obstacle):
        remembered.cache_clear()  # type: ignore[attr-defined]


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    """The library of a source."""
    with pytest.MonkeyPatch.context() as patch:
        path = folder / "changed.cpp"
        path.write_text(source)
        patch.setattr(build, "SOURCE", path)
        patch.setattr(build, "FLAGS", QUICK_FLAGS)
        return build._declared(ctypes.CDLL(str(build._compile(build._compiler(), folder))))
