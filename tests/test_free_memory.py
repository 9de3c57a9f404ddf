"""Memory that was freed goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from cocoa_engine.free_memory import release_free_memory

FREED = """
from pathlib import Path
from cocoa_engine.free_memory import release_free_memory

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

kept, freed = [], []
for _ in range(20_000):  # pieces of 4 kB that are not at the end of the heap
    freed.append(bytearray(4000))
    kept.append(bytearray(60))
before = resident()
freed.clear()
held = resident()
assert release_free_memory()
print(before - held, held - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_was_freed_goes_back() -> None:
    run = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True, timeout=120)
    without, more = map(int, run.stdout.split())
    assert without < 20_000_000 < more


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not release_free_memory()

    def windows(_: None) -> None:
        raise TypeError("bad argument type")

    monkeypatch.setattr("ctypes.CDLL", windows)
    assert not release_free_memory()
