"""Confines the current process by the kernel. After it, no file, process or socket can be opened.

A seccomp filter (libseccomp) allows computing, memory that is not executable, waiting, and reading and writing the file
descriptors that are open already. Every other system call fails with ``EPERM``. Resource limits bound time and memory.
Root becomes the user "nobody".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator

_LIBRARY = "libseccomp.so.2"
_NOBODY = 65534
_ERRNO = 0x00050000  # SCMP_ACT_ERRNO, with the number of the error in its low bits
_ALLOW = 0x7FFF0000  # SCMP_ACT_ALLOW
_MASKED_EQUAL = 7  # SCMP_CMP_MASKED_EQ
_ALLOWED = (
    "read", "write", "close", "lseek", "fstat", "exit", "exit_group", "restart_syscall",
    "brk", "munmap", "mremap", "madvise",
    "futex", "futex_time64", "rseq", "sched_yield", "membarrier",
    "rt_sigreturn", "rt_sigaction", "rt_sigprocmask", "sigaltstack",
    "clock_gettime", "clock_gettime64", "clock_getres", "clock_nanosleep", "clock_nanosleep_time64", "nanosleep",
    "gettimeofday", "time", "times", "getrusage", "getrandom", "select", "pselect6", "poll", "ppoll",
    "getpid", "getppid", "gettid", "getuid", "geteuid", "getgid", "getegid", "getcwd", "uname", "sysinfo",
)  # fmt: skip
_ALLOWED_UNLESS_EXECUTABLE = ("mmap", "mprotect")  # by their third argument


class ConfinementError(Exception):
    """The kernel or its library cannot confine the process."""


class _Condition(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def limit(seconds: float, memory_mb: int) -> None:
    """Set limits of the kernel, and change from root to the user "nobody"."""
    for what, value in (
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS defines some of them without supporting them
            resource.setrlimit(what, (value, value))
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # in a user namespace that has no other user
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)


def filter_system_calls() -> None:
    """Install the filter. It cannot be removed.

    Raises:
        ConfinementError: the library or the kernel cannot do it.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfinementError(f"{_LIBRARY} cannot be loaded") from error
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Condition),
    ]  # fmt: skip
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    filter = library.seccomp_init(_ERRNO | errno.EPERM)
    if not filter:
        raise ConfinementError("seccomp_init failed")
    for name, condition in _rules():
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # a call that this architecture does not have
            continue
        if result := library.seccomp_rule_add_array(filter, _ALLOW, number, int(condition is not None), condition):
            raise ConfinementError(f"seccomp_rule_add {name}: {os.strerror(-result)}")
    if result := library.seccomp_load(filter):
        raise ConfinementError(f"seccomp_load: {os.strerror(-result)}")


def _rules() -> Iterator[tuple[str, _Condition | None]]:
    for name in _ALLOWED:
        yield name, None
    for name in _ALLOWED_UNLESS_EXECUTABLE:
        yield name, _Condition(2, _MASKED_EQUAL, mmap.PROT_EXEC, 0)
