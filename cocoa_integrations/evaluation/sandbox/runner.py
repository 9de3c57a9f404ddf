"""Starts the worker and the judge of a run, ends them in time, and reads the judge's report."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from json import dumps, loads
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

from cocoa_engine.errors import ConfigError
from cocoa_engine.safe_text import safe, shortened
from cocoa_integrations.evaluation.sandbox.imports import standard_modules

SECONDS = 10.0
MEMORY_MB = 512
_MAX_REPORT = 2**14  # bytes; a reason is much shorter
_START = """
import importlib, sys, types
package = sys.modules["cocoa_sandbox"] = types.ModuleType("cocoa_sandbox")
package.__path__ = [sys.argv[1]]
getattr(importlib.import_module("cocoa_sandbox." + sys.argv[2]), sys.argv[3])()
"""  # this folder as a package of its own, without the packages above it


class Verdict(NamedTuple):
    """Whether the code passed all tests, and otherwise the reason."""

    passed: bool
    reason: str


def run_code(
    code: str,
    tests: Sequence[str],
    *,
    tested: Collection[str] = (),
    seconds: float = SECONDS,
    memory_mb: int = MEMORY_MB,
    unsafe: bool = False,
) -> Verdict:
    """Run code in one confined process, and tests of it in another.

    Args:
        code: Python source. It can import the standard library by ``import`` statements, and open nothing.
        tests: statements, such as asserts. A name that they do not define and Python does not have is looked up in the
            code. Python's own names and modules are Python's, also if the code replaces them.
        tested: names that are looked up in the code even if Python has them, such as ``sum``.
        seconds: time limit for code and tests together (wall clock).
        memory_mb: limit of the address space of each process.
        unsafe: where the system cannot confine a process, run the code in a limited process that prevents only
            accidents, instead of refusing.

    Raises:
        ConfigError: the system cannot confine a process, and ``unsafe`` was not given.
    """
    confined = require_confinement(unsafe=unsafe)
    job = {
        "code": code,
        "modules": standard_modules([code]),
        "tests": list(tests),
        "test_modules": standard_modules([*tests, code]),  # tests use modules that the code imports
        "tested": list(tested),
        "seconds": seconds,
        "memory_mb": memory_mb,
        "confined": confined,
    }
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(open(end, "rb", buffering=0)) for _ in range(2) for end in os.pipe()]
        requests, to_worker, replies, to_judge = (end.fileno() for end in ends)
        worker = stack.enter_context(_process("worker", stdin=requests, stdout=to_judge))
        job["channel"] = channel = (replies, to_worker)
        judge = stack.enter_context(_process("judge", stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=channel))
        for end in ends:  # so that each process sees the end of the other
            end.close()
        late: list[bool] = []

        def stop() -> None:
            late.append(True)
            _kill(judge)
            _kill(worker)

        timer = Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        report = _report(judge, job)
        _kill(worker)
    if late:
        return Verdict(False, f"time-out after {seconds:g} s")
    try:
        found = loads(report)
        return Verdict(found["passed"] is True, safe(shortened(str(found["reason"]), 300)))
    except (ValueError, TypeError, KeyError):
        return Verdict(False, f"the tests ended with status {judge.returncode} before they had passed")


def require_confinement(*, unsafe: bool = False) -> bool:
    """Refuse to run code where the kernel cannot confine it.

    Args:
        unsafe: run it anyway.

    Returns:
        Whether it is confined.

    Raises:
        ConfigError: it is not, and ``unsafe`` was not given.
    """
    if os.name != "posix":
        raise ConfigError("running generated code needs Linux (with unsafe, any POSIX system)")
    if _filter_works():
        return True
    if unsafe:
        warnings.warn(
            "nothing confines the code that the model writes: it runs in a process that prevents only accidents",
            stacklevel=2,
        )
        return False
    raise ConfigError(
        "this system cannot confine the code that the model writes: it needs a Linux that allows seccomp filters, and "
        "libseccomp (the package libseccomp2). On a disposable machine, --run-code=unsafe (run_code='unsafe') runs the "
        "code in a process that prevents only accidents"
    )


@contextlib.contextmanager
def _process(name: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this folder, which is dead at the end."""
    command = [*(_bubblewrap() if _bubblewrap_works() else ()), *_command(name)]
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, cwd="/", env={"PATH": ""}, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        _kill(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not written to a dead process
                    stream.close()
        process.wait()


def _command(module: str, function: str = "main") -> list[str]:
    return [sys.executable, "-I", "-S", "-B", "-c", _START, str(Path(__file__).parent), module, function]


def _report(judge: subprocess.Popen[bytes], job: dict[str, Any]) -> bytes:
    """Send the job, and read the report until the judge ends or is killed; never more than its maximum."""
    assert judge.stdin is not None
    assert judge.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # the judge was killed
        judge.stdin.write(dumps(job).encode())
        judge.stdin.close()
    return judge.stdout.read(_MAX_REPORT)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


@cache
def _filter_works() -> bool:
    return _succeeds(_command("process", "probe"))


@cache
def _bubblewrap_works() -> bool:
    return shutil.which("bwrap") is not None and _succeeds([*_bubblewrap(), sys.executable, "-I", "-S", "-c", ""])


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _bubblewrap() -> list[str]:
    """The start of a command that runs without network, other processes, and files but those of Python, read-only."""
    seen = dict.fromkeys(("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, sys.prefix))
    binds = [part for path in (*seen, str(Path(__file__).parent)) for part in ("--ro-bind-try", path, path)]
    return [
        shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        "--clearenv", *binds, "--dev", "/dev", "--chdir", "/",
    ]  # fmt: skip
