"""Runs Python code that a model wrote in a limited process. This is not full isolation: use a disposable machine.

The process has limited time and memory, no network, no further processes, no writable files, an empty environment and a
temporary folder. See :mod:`cocoa_integrations.evaluation.sandbox_process` for how the limits are enforced.
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
from cocoa_engine.safe_text import safe, shortened

SECONDS = 10.0
MEMORY_MB = 512
_PROCESS = Path(__file__).with_name("sandbox_process.py")
_REPORTED = 2000  # characters of what the process wrote on stderr


class Verdict(NamedTuple):
    """Whether the code passed all tests, and otherwise the reason."""

    passed: bool
    reason: str


def run_code(code: str, tests: Sequence[str], *, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> Verdict:
    """Run code and then its tests (statements, such as asserts) in a limited process.

    Args:
        code: Python source.
        tests: statements that run after the code, in its namespace.
        seconds: time limit for code and tests together (wall clock).
        memory_mb: limit of the address space.

    Raises:
        ConfigError: the operating system cannot limit a process (Windows).
    """
    if os.name != "posix":
        raise ConfigError("running generated code needs a POSIX system (Linux, macOS), where processes can be limited")
    # The code can exit in any way. The process reports success with a secret token that the code cannot reach: no frame
    # contains it, and other ways to it are refused.
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
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the process group has already ended
                os.killpg(process.pid, signal.SIGKILL)
    report = output.decode("utf-8", "replace").strip()
    if report == token:
        return Verdict(True, "passed")
    reason = report.replace(token, "")[-_REPORTED:].strip().rpartition("\n")[2]
    return Verdict(
        False, safe(shortened(reason, 300)) or f"ended with status {process.returncode} before its tests had passed"
    )
