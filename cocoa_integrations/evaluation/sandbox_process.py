"""The limited process of :mod:`cocoa_integrations.evaluation.sandbox`: a script that imports nothing of this package.

First the kernel's limits (CPU time, memory, no bytes into files, no further processes, on Linux a network namespace
without any network, where the kernel allows one), then an audit hook, which Python code cannot take off again: it
refuses sockets, processes, writing to files, and native code through ctypes.
"""

import contextlib
import io
import json
import os
import resource
import sys
from typing import Any

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile",
    "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
    "os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.mkfifo", "os.mknod", "os.chroot", "os.chflags",
    "os.lockf", "shutil.", "tempfile.", "ctypes.", "pty.", "resource.", "signal.pthread_kill", "fcntl.", "urllib.",
    "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "webbrowser.", "sqlite3.", "mmap.", "syslog.", "dbm.",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _limit(what: int, value: int) -> None:
    """Set a limit of the kernel, as far as the present one allows."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # macOS knows some of them by name only
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(what, (value, value))


def _leave_the_network() -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        unshare = ctypes.CDLL(None).unshare
        if unshare(_CLONE_NEWNET) != 0:
            unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        mode, flags = args[1], args[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITING):
            raise PermissionError(f"generated code may not write files ({args[0]!r})")
    elif event.startswith(_REFUSED):
        raise PermissionError(f"generated code may not do this ({event})")


def _main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what the code prints goes nowhere
        os.dup2(quiet, stream)
    sys.stdin = io.StringIO()
    _leave_the_network()
    _limit(resource.RLIMIT_AS, job["memory_mb"] * 2**20)
    _limit(resource.RLIMIT_CPU, int(job["seconds"]) + 1)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, 32)
    _limit(resource.RLIMIT_NPROC, 0)
    token = job.pop("token")
    try:
        sys.addaudithook(_refuse)
        space = {"__name__": "__generated__"}
        exec(compile(job["code"], "<generated>", "exec"), space)
        for test in job["tests"]:
            exec(compile(test, "<test>", "exec"), space)
    except BaseException as error:
        said = " ".join(str(error).split())
        message = f"{type(error).__name__}: {said}" if said else type(error).__name__
    else:
        message = token
    report.write(message[:500])
    report.flush()
    os._exit(0 if message is token else 1)


if __name__ == "__main__":
    _main()
