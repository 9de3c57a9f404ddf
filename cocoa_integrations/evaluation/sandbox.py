"""Runs Python code that a model wrote, with limits: a seat belt, not a prison. Use a machine with nothing to lose.

The code runs in a process of its own: no time, memory, files or processes beyond what it is given, no network, an empty
environment and a fresh folder. See :mod:`cocoa_integrations.evaluation.sandbox_process` for what is enforced there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import NamedTuple

from cocoa_engine.errors import ConfigError

SECONDS = 10.0
MEMORY_MB = 512
_PROCESS = Path(__file__).with_name("sandbox_process.py")
_REPORTED = 2000  # characters of what the process wrote on stderr


class Verdict(NamedTuple):
    """Whether the code passed all its tests, and if not, why."""

    passed: bool
    reason: str


def run_code(code: str, tests: Sequence[str], *, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> Verdict:
    """Run code and then its tests (statements, such as asserts) in a limited process.

    Args:
        code: Python source.
        tests: run after it, in its namespace.
        seconds: of wall clock, for all of it.
        memory_mb: of address space.

    Raises:
        ConfigError: the system cannot limit a process (Windows).
    """
    if os.name != "posix":
        raise ConfigError("running generated code needs a POSIX system (Linux, macOS): here it cannot be limited")
    # The code can end its process as it likes. That all tests have passed is said by a word which it is not given:
    # it stands in no frame, and what else leads to it is refused.
    token = secrets.token_hex(16)
    job = dumps({"code": code, "tests": list(tests), "token": token})
    with (
        tempfile.TemporaryDirectory(prefix="cocoa-code-") as folder,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_PROCESS), str(seconds), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": "", "HOME": folder, "PYTHONHASHSEED": "0"},
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(job.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"time-out after {seconds:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, with all it started
                os.killpg(process.pid, signal.SIGKILL)
    report = output.decode("utf-8", "replace").strip()
    if report == token:
        return Verdict(True, "passed")
    reason = report.replace(token, "")[-_REPORTED:].strip().rpartition("\n")[2]
    return Verdict(False, reason or f"ended with status {process.returncode} before its tests had passed")
