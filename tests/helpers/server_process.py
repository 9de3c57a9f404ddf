"""A server in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.helpers.in_threads import wait_until
from tests.helpers.paths import ROOT
from tests.helpers.served import PATIENCE

PROGRAM = """
import time
from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.process import DrainingServer, listening
from tests.helpers.served import speaker
settings = ServerSettings(port=0, shutdown_timeout=0)
engine = {engine}
{more}
server = DrainingServer(create_app(engine, settings), ends_process=True, log_level="error")
socket = listening(settings)
print(socket.getsockname()[1], flush=True)
server.run(sockets=[socket])
"""


@contextmanager
def server_process(engine: str, more: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with the engine of an expression, when it is ready, and its address. It is killed at the end."""
    command = [sys.executable, "-c", PROGRAM.format(engine=engine, more=more)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
            wait_until(lambda: serves(url))
            yield process, url
        finally:
            process.kill()


def serves(url: str) -> bool:
    """Whether a server is ready."""
    try:
        return httpx.get(url + "/health", timeout=PATIENCE).status_code == 200
    except httpx.HTTPError:
        return False
