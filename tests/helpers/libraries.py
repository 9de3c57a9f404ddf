"""Libraries of changed sources, a compiler for tests, and a process that remembers nothing of the kernels."""

import ctypes
from pathlib import Path

import pytest

from cocoa_engine.execution.forward import trial
from cocoa_engine.execution.native import build, operators

needs_kernels = pytest.mark.skipif(trial.obstacle() is not None, reason=f"no kernels: {trial.obstacle()}")
"""Skips a test on a machine that cannot use the kernels."""

QUICK_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS)
"""Kernels that compute the same, slowly, but compile sooner."""

_PROCESSOR = Path("/proc/cpuinfo")
MULTIPLIES_PAIRS = _PROCESSOR.is_file() and "avx512_bf16" in _PROCESSOR.read_text()
"""Whether the kernels round inputs to bfloat16 where they may."""

# Its last argument is the output. It copies what it has compiled with the same arguments from the same code.
KEEPING_COMPILER = """#!/bin/sh
case " $* " in *" -c "*) ;; *) exec g++ "$@" ;; esac
given=""
for argument; do
    case "$argument" in *.cpp) source=$argument ;; *.o) output=$argument ;; *) given="$given $argument" ;; esac
done
kept=$(dirname "$0")/$({ echo "$given"; grep -v "^//" "$source"; } | sha256sum | cut -c1-32).o
[ -f "$kept" ] || { g++ "$@" && cp "$output" "$kept.$$" && mv "$kept.$$" "$kept"; } || exit 1
cp "$kept" "$output"
"""


def keeping_compiler(folder: Path) -> Path:
    """A compiler that compiles nothing twice; it keeps the objects in the folder."""
    compiler = folder / "keeping-g++"
    compiler.write_text(KEEPING_COMPILER)
    compiler.chmod(0o755)
    return compiler


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
