"""Programs run in processes of their own, and a disk on which files cannot grow."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context

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


def forked(*works: Callable[[], object]) -> list[int | None]:
    """The exit codes of children of this process, each of which does a work. They run at once."""
    children = [get_context("fork").Process(target=work) for work in works]
    for child in children:
        child.start()
    for child in children:
        child.join(LIMIT)
    return [child.exitcode for child in children]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


def read_terminal(master: int, shown: list[bytes]) -> None:
    """Append what is written to a terminal, until its other end is closed."""
    with suppress(OSError):
        while data := os.read(master, 65536):
            shown.append(data)


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file of this process grows beyond a number of bytes: a longer write fails, as on a full disk."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
