"""All that a server's process writes: no text of a request, and no control characters, whoever writes it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.served import CHAT, PATIENCE

SECRET = "my-secret"
FORGED = f"{SECRET}\nERROR: a forged line\x1b[31m\x9b31m\u2028"

PROGRAM = """
import asyncio, logging, sys, threading, warnings

from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.process import DrainingServer, listening
from cocoa_integrations.server.errors import unhandled_logged
from tests.helpers.served import speaker

class Failing:
    def __init__(self, text):
        self.text = text
    def __del__(self):
        raise ValueError(self.text)

def raise_in_thread(text):
    raise ValueError(text)

def chat(messages, **options):
    text = messages[0]["content"]
    warnings.warn(text)
    foreign = logging.getLogger("another.package")
    foreign.error(text)
    foreign.error("a template: %s", text)
    foreign.error("a template of two: %s %s", text)
    logging.getLogger("transformers.generation").warning(text)
    thread = threading.Thread(target=raise_in_thread, args=(text,))
    thread.start()
    thread.join()
    Failing(text)
    loop.call_soon_threadsafe(raise_in_thread, text)
    try:
        raise KeyError(text)
    except KeyError as error:
        foreign.exception("an error")
        raise RuntimeError(text) from error

async def note_loop(server, sockets):
    global loop
    loop = asyncio.get_running_loop()
    await server.serve(sockets)

engine = speaker()
engine.chat = chat
for log_prompts in (False, True):
    settings = ServerSettings(port=0, shutdown_timeout=0, log_prompts=log_prompts)
    app = create_app(engine, settings)
    server = DrainingServer(app)
    opened = listening(settings)
    print(opened.getsockname()[1], flush=True)
    with unhandled_logged(app.state.cocoa.shows_texts):
        asyncio.run(note_loop(server, [opened]))
"""

BODY = json.dumps({"messages": [{"role": "user", "content": FORGED}]})
REQUESTS = (
    f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
    f"X-Forwarded-For: {SECRET}\x9b31m\r\nUser-Agent: {SECRET}\r\n{SECRET}: {SECRET}\r\n\r\n{BODY}",
    f"{SECRET} /health?key={SECRET} HTTP/1.1\r\nHost: {SECRET}\r\n\r\n",
    f"GET /health HTTP/{SECRET}\r\n\r\n",
    f"{SECRET}\r\n\r\n",
)


def ask(process: subprocess.Popen[str]) -> list[str]:
    """What the process has written before its server listened; then it answers the requests, and ends its server."""
    assert process.stdout is not None
    written: list[str] = []
    while not (line := process.stdout.readline()).strip().isdecimal():
        assert line, "".join(written)
        written.append(line)
    for request in REQUESTS:
        with socket.create_connection(("127.0.0.1", int(line)), timeout=PATIENCE) as opened:
            opened.sendall(request.encode("latin-1"))
            assert opened.recv(9)
    process.terminate()
    return written


@pytest.mark.slow
def test_nothing_that_a_server_writes_has_text_of_a_request() -> None:
    """Text that may be written stays in its line."""
    with subprocess.Popen(
        [sys.executable, "-W", "default", "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONASYNCIODEBUG": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    ) as process:
        try:
            ask(process)
            hidden = "".join(ask(process))
            shown, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert SECRET not in hidden
    assert hidden.count("RuntimeError (--log-prompts shows its message)") == 1
    assert "another.package has a message" in hidden
    assert "in raise_in_thread" in hidden  # where an error was raised is shown
    assert '"_OTHER /health HTTP/1.1" 400' in hidden
    assert "127.0.0.1" in hidden
    lines = shown.splitlines()
    assert any("another.package" not in line and "forged" in line for line in lines if SECRET in line)
    assert not any(line.startswith("ERROR: a forged") for line in lines)
    assert not {"\x1b", "\x9b", "\u2028"} & set(shown)
