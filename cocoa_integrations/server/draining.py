"""The process of a server: uvicorn, which lets running answers end before it stops."""

from __future__ import annotations

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

from cocoa_engine.errors import ConfigError
from cocoa_engine.logs import safe_logger
from cocoa_integrations._shared import workers
from cocoa_integrations.server.connection import Connection
from cocoa_integrations.server.lifecycle import ServerState
from cocoa_integrations.server.log_lines import log_config
from cocoa_integrations.server.settings import ServerSettings

logger = safe_logger("cocoa_integrations.server")

CLOSING = 5
"""Seconds in which ended answers are sent, before their connections are closed."""

ENDING = 0.5
"""Seconds in which cancelled work ends, and after it in which requests whose work goes on are answered."""


class DrainingServer(uvicorn.Server):
    """Runs an app until a signal, and then until its answers have ended.

    After SIGTERM or Ctrl-C the server still listens, and refuses new calls with status 503. Answers that have not ended
    after ``shutdown_timeout`` seconds are cancelled; streams then end with an error. A second signal does not wait.

    Args:
        app: the app, from :func:`~cocoa_integrations.server.create_app`.
        ends_process: end the process if cancelled work has not ended a second later, such as a long forward pass.
        **options: further options of uvicorn.
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
        deadline = time.monotonic() + ENDING
        while self._ends_process and workers.running():
            await asyncio.sleep(0.01)
            if time.monotonic() > deadline:
                self.config.timeout_graceful_shutdown = 0  # requests are answered without their work
                threading.Thread(target=_end_process, daemon=True).start()
                break
        await super().shutdown(sockets)


def _end_process() -> None:
    time.sleep(ENDING)
    if count := workers.running():
        logger.warning("the process ends while %d worker threads run, which a cancellation did not end", count)
        os._exit(0)


def listening(settings: ServerSettings) -> socket.socket:
    """A socket that listens on the address of a server.

    Raises:
        ConfigError: the address is taken, or is not one of this machine.
    """
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        opened = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}; choose others with --host and --port"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    logger.info("Listening on http://%s:%d (Press CTRL+C to quit)", shown, opened.getsockname()[1])
    return opened
