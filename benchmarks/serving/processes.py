"""The processes under test: servers on a free port of this machine, and what they use of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.settings import ROOT

STARTING = 180
"""Seconds in which a server must be ready."""


def environment(threads: int) -> dict[str, str]:
    """The environment of a process with a number of threads."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **dict.fromkeys(names, str(threads))}


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


class Server:
    """A running server.

    Attributes:
        url: its address.
        process: its process.

    Args:
        command: the command.
        port: the port on which it listens.
        threads: its number of threads.
        log: the file for its output.
    """

    def __init__(self, command: Sequence[str], port: int, threads: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(command, env=environment(threads), stdout=output, stderr=output)
        self.process = psutil.Process(self._popen.pid)

    def wait_until_ready(self) -> None:
        """Wait until ``/health`` says that the server serves.

        Raises:
            RuntimeError: it has ended, or is not ready in time.
        """
        deadline = time.monotonic() + STARTING
        while time.monotonic() < deadline and self._popen.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"the server does not serve: {self._log.read_text(errors='replace')[-2000:]}")

    def usage(self) -> dict[str, float]:
        """Memory in MiB and processor time in seconds."""
        memory, times = self.process.memory_full_info(), self.process.cpu_times()
        return {
            "unique_mib": round(memory.uss / 2**20, 1),
            "processor_seconds": round(times.user + times.system, 2),
        }

    def kill(self) -> None:
        """End the process at once, as ``kill -9`` does."""
        self._popen.kill()
        self._popen.wait(30)


@contextmanager
def running(command: Sequence[str], port: int, threads: int, log: Path) -> Iterator[Server]:
    """A server that is ready, within the context."""
    server = Server(command, port, threads, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def cocoa_serve(port: int, threads: int, *options: str) -> list[str]:
    """The command of ``cocoa serve``, from the checkout."""
    program = "import typer; from cocoa_integrations.server.command import serve; typer.run(serve)"
    return [sys.executable, "-c", program, "--port", str(port), "--threads", str(threads), *options]


def transformers_serve(port: int, model: str, *options: str) -> list[str]:
    """The command of ``transformers serve`` for one model, in float32."""
    program = "from transformers.cli.transformers import main; main()"
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-c", program, "serve", model, "--device", "cpu", "--dtype", "float32", *where, *options]


def load_average() -> float:
    """The load of the machine over the last minute."""
    return round(os.getloadavg()[0], 2)
