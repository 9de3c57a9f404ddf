"""An audit hook that refuses sockets, processes and writing to files. It prevents accidents, not attacks.

It is added only where the kernel does not confine the process, and the user allowed that.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile",
    "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
    "os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.mkfifo", "os.mknod", "os.chroot", "os.chflags",
    "os.lockf", "shutil.", "tempfile.", "ctypes.", "pty.", "resource.", "signal.pthread_kill", "fcntl.", "urllib.",
    "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "webbrowser.", "sqlite3.", "mmap.", "syslog.", "dbm.",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def add() -> None:
    """Add the hook to this process. It cannot be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        mode, flags = args[1], args[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITING):
            raise PermissionError(f"generated code may not write files ({args[0]!r})")
    elif event.startswith(_REFUSED):
        raise PermissionError(f"generated code may not do this ({event})")
