"""The limited process of :mod:`cocoa_integrations.evaluation.sandbox`: a script without imports from this package.

It first sets kernel limits: CPU time, memory, no data in files, no further processes, and on Linux a network namespace
without a network, where the kernel allows one. The process limit does not apply to root, so a root process changes to
the user "nobody" if that user can read Python's library. Then it adds an audit hook, which refuses sockets, processes,
writing to files, native code, and access to the hook itself.

Arguments: seconds and MiB. On stdin, as JSON: the code, its tests, and the token that reports success.
"""

import contextlib
import io
import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_NOBODY = 65534
_REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile",
    "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
    "os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.mkfifo", "os.mknod", "os.chroot", "os.chflags",
    "os.lockf", "shutil.", "tempfile.", "ctypes.", "pty.", "resource.", "signal.pthread_kill", "fcntl.", "urllib.",
    "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "webbrowser.", "sqlite3.", "mmap.", "syslog.", "dbm.",
    "gc.",
)  # fmt: skip
_NOT_IMPORTED = frozenset((  # they reach the system, or an interpreter without the hook, without an audit event
    "ctypes", "_ctypes", "_posixsubprocess", "_posixshmem", "_sqlite3", "_dbm", "_gdbm", "_tkinter", "readline",
    "_testcapi", "_testinternalcapi", "_xxsubinterpreters", "_interpreters",
))  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _limit(what: int, value: int) -> None:
    """Set a limit of the kernel. It cannot exceed the current hard limit."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # macOS defines some of them without supporting them
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(what, (value, value))


def _unshare(what: int) -> bool:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).unshare(what) == 0)
    return False


def _leave_root() -> None:
    """Change from root to the user "nobody", if that user can read the modules that the code imports."""
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        os.setegid(_NOBODY)
        os.seteuid(_NOBODY)
    readable = os.access(os.__file__, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
    os.seteuid(0)
    os.setegid(0)
    if readable:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)


def _no_new_process(*_: Any) -> Any:
    raise PermissionError("generated code may not do this (fork_exec)")


def _disarm_modules() -> None:
    """Remove the forbidden modules. ``subprocess``, which other modules import, keeps a stub of its function."""
    with contextlib.suppress(ImportError):
        import _posixsubprocess

        _posixsubprocess.fork_exec = _no_new_process
    for name in [name for name in sys.modules if name.partition(".")[0] in _NOT_IMPORTED - {"_posixsubprocess"}]:
        del sys.modules[name]


def _refuse(
    event: str,
    args: tuple[Any, ...],
    # bound as defaults, because the code could replace module-level and built-in names
    refused: tuple[str, ...] = _REFUSED,
    not_imported: frozenset[str] = _NOT_IMPORTED,
    writing: int = _WRITING,
    a: Callable[..., bool] = isinstance,
    text: type[str] = str,
    number: type[int] = int,
    letters: type[set[str]] = set,
    forbidden: type[PermissionError] = PermissionError,
    no_module: type[ImportError] = ImportError,
) -> None:
    if event == "open":
        mode, flags = args[1], args[2]
        if (a(mode, text) and letters(mode) & letters("wax+")) or (a(flags, number) and flags & writing):
            raise forbidden(f"generated code may not write files ({args[0]!r})")
    elif event == "import":
        if args[0].rpartition(".")[2] in not_imported:  # a module's file is found by the last part alone
            raise no_module(f"generated code may not import {args[0]}")
    elif event.startswith(refused):
        raise forbidden(f"generated code may not do this ({event})")


def _steps(report: int) -> tuple[Callable[[], Any], ...]:
    """The steps of the process: the code, each test, and writing the token that reports success.

    The caller must not assign them to a variable. The remaining steps are then only referenced by the running loop. The
    code can inspect every frame above it, and finds neither the token nor the tests.
    """
    job = json.loads(sys.stdin.buffer.read())
    parts = [compile(job["code"], "<generated>", "exec"), *(compile(test, "<test>", "exec") for test in job["tests"])]
    space: dict[str, Any] = {"__name__": "__generated__"}
    return (*(partial(exec, part, space) for part in parts), partial(os.write, report, job["token"].encode()))


def _main() -> None:
    seconds, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    report = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # discard what the code prints
        os.dup2(quiet, stream)
    alone = _unshare(_CLONE_NEWNET)
    _leave_root()
    if not alone:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    _disarm_modules()
    _limit(resource.RLIMIT_AS, memory_mb * 2**20)
    _limit(resource.RLIMIT_CPU, int(seconds) + 1)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, 32)
    _limit(resource.RLIMIT_NPROC, 0)
    leave = os._exit
    try:
        for step in _armed(_steps(report), quiet):
            step()
    except BaseException as error:
        said = " ".join(str(error).split())
        message = f"{type(error).__name__}: {said}" if said else type(error).__name__
        os.write(report, message[:500].encode("utf-8", "replace"))
    leave(0)


def _armed(steps: tuple[Callable[[], Any], ...], quiet: int) -> tuple[Callable[[], Any], ...]:
    """The steps, after the hook was added and stdin was closed."""
    os.dup2(quiet, 0)
    sys.stdin = io.StringIO()
    sys.addaudithook(globals().pop("_refuse"))  # removed, so that the code cannot change it
    return steps


if __name__ == "__main__":
    _main()
