"""Programs run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

LIMIT = 240.0
"""Seconds after which a program that has not ended is taken to be stuck."""


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever it ends with."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)


def python(code: str) -> str:
    """What a Python program prints; it must succeed."""
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_terminal(master: int, shown: list[bytes]) -> None:
    """Append what is written to a terminal, until its other end is closed."""
    with suppress(OSError):
        while data := os.read(master, 65536):
            shown.append(data)
