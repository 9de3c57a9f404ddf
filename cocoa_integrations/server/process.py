"""The process of a server: uvicorn, which answers malformed HTTP as JSON, and lets running answers end."""

import asyncio
import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import safe_logger
from cocoa_integrations._shared import workers
from cocoa_integrations.server.errors import bad_request, log_config, response_of
from cocoa_integrations.server.lifecycle import ServerState
from cocoa_integrations.server.settings import ServerSettings

logger = safe_logger("cocoa_integrations.server")

_MALFORMED = "the request is not valid HTTP/1.1; see its request line, headers and chunk sizes"

_LINGER = 2.0
"""Seconds in which the rest of a malformed request is dropped. A connection that is closed before it was read is reset,
and the answer is lost."""

CLOSING = 5
"""Seconds in which ended answers are sent, before their connections are closed."""

ENDING = 0.5
"""Seconds in which cancelled work ends, and after it in which requests whose work goes on are answered."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # what is installed decides
    """uvicorn's connection, with errors of the HTTP syntax as JSON."""

    transport: Any
    cycle: Any
    _ends = False

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if not self._ends:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what its parser refuses."""
        self._ends = True
        if self.cycle is not None:
            waiting = getattr(self, "pipeline", ())  # of httptools: requests that came before the earlier answer ended
            complete = self.cycle.response_complete and not self.cycle.more_body
            if waiting or (self.cycle.response_started and not complete):
                # an answer is under way, or the malformed request has got one, as one that is refused early has
                self.transport.close()
                return
        response = response_of(bad_request(_MALFORMED, None, "malformed_request"))
        response.headers["connection"] = "close"
        lines = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in response.raw_headers)]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.resume_reading()
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER, self.transport.close)

    def _unsupported_upgrade_warning(self) -> None:
        """Not said: uvicorn would advise to install web sockets, which this server does not have."""


class DrainingServer(uvicorn.Server):
    """Runs an app until a signal, and then until its answers have ended.

    After SIGTERM or Ctrl-C the server still listens, and refuses new calls with status 503. Answers that have not ended
    after ``shutdown_timeout`` seconds are cancelled; streams then end with an error. A second signal does not wait.
    ``ends_process`` ends the process if cancelled work has not ended a second later, such as a long forward pass.
    """

    def __init__(self, app: FastAPI, *, ends_process: bool = False, **options: Any) -> None:
        self._ends_process = ends_process
        self._state: ServerState = app.state.cocoa
        settings = self._state.settings
        own = {"host": settings.host, "port": settings.port, "timeout_graceful_shutdown": CLOSING, "http": Connection}
        # web sockets are off: a request for one is answered as plain HTTP. Addresses that headers give are not believed
        own |= {"ws": "none", "proxy_headers": False, "log_config": log_config(self._state.shows_texts)}
        super().__init__(uvicorn.Config(app, **{**own, **options}))
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, or stop at once at the second signal."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._state.settings.shutdown_timeout
            self._state.drain()
            if sig == signal.SIGINT:
                self._captured_signals.append(sig)  # raised again at the end, so that Ctrl-C is an interrupt
            return
        self._deadline = 0.0
        if sig == signal.SIGINT and self.should_exit:
            self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Returns whether to stop."""
        waiting = self._deadline is not None and time.monotonic() < self._deadline and len(self._state.calls)
        if self._state.phase == "failed" or (self._deadline is not None and not waiting):
            self._state.calls.cancel()
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn after the last tick."""

        def end_process() -> None:
            time.sleep(ENDING)
            if count := workers.running():
                logger.warning("the process ends while %d worker threads run, which a cancellation did not end", count)
                os._exit(0)

        deadline = time.monotonic() + ENDING
        while self._ends_process and workers.running():
            await asyncio.sleep(0.01)
            if time.monotonic() > deadline:
                self.config.timeout_graceful_shutdown = 0  # requests are answered without their work
                threading.Thread(target=end_process, daemon=True).start()
                break
        await super().shutdown(sockets)


def listening(settings: ServerSettings) -> socket.socket:
    """A socket that listens on the address of a server; :class:`ConfigError` if it is taken, or not of this machine."""
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        opened = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        message = f"cannot listen on {host}, port {port}: {error}; choose others with --host and --port"
        raise ConfigError(message) from None
    shown = f"[{host}]" if ":" in host else host
    logger.info("Listening on http://%s:%d (Press CTRL+C to quit)", shown, opened.getsockname()[1])
    return opened
