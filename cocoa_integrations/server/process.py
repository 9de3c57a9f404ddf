"""The process of a server: its phases, the memory that it keeps, and uvicorn, which lets running answers end.

By default glibc has up to eight arenas for each core. Each keeps what its threads have freed, and grows until it has
seen the largest work once, so that the memory of a server grows for a long time. With one arena it grows less, and
what is free there is given back every few seconds.
"""

import asyncio
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Any, Literal, cast

import uvicorn
from fastapi import FastAPI, Request

from cocoa_engine import CocoaEngine
from cocoa_engine.errors import ConfigError
from cocoa_engine.integration import safe_logger
from cocoa_engine.memory import release_free_memory
from cocoa_integrations._shared import engines
from cocoa_integrations.server.errors import ApiError, log_config, shutting_down
from cocoa_integrations.server.metrics import Metrics
from cocoa_integrations.server.middleware import Bodies
from cocoa_integrations.server.settings import ServerSettings
from cocoa_integrations.server.work import Calls

logger = safe_logger("cocoa_integrations.server")

_ARENA_MAX = -8
"""``M_ARENA_MAX`` of glibc's ``malloc.h``."""

RELEASE_INTERVAL = 10.0
"""Seconds between two releases of free memory."""

Phase = Literal["loading", "ready", "draining", "failed"]
Loader = Callable[[], CocoaEngine]


def one_arena(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a new process has one arena; none if the environment of this one sets the allocator."""
    is_set = "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
    return {} if is_set or any(name.startswith("MALLOC_") for name in environment) else {"MALLOC_ARENA_MAX": "1"}


def keep_one_arena() -> bool:
    """Let all threads of this process share one arena of glibc's allocator, unless the environment sets it.

    Call this before there are threads: arenas that exist remain. Returns whether it was done. It is not with another C
    library.
    """
    if not one_arena():
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  # another library's mallopt has other numbers
        return bool(library.mallopt(_ARENA_MAX, 1))
    except (OSError, TypeError, AttributeError):  # no such library (Windows: TypeError), or no such function
        return False


@asynccontextmanager
async def free_memory_released() -> AsyncIterator[None]:
    """Within the context, give memory that was freed back to the system every few seconds.

    Not if the environment sets glibc's allocator otherwise than this module.
    """

    async def release() -> None:
        while one_arena(dict(os.environ.items() - {("MALLOC_ARENA_MAX", "1")})):
            await asyncio.sleep(RELEASE_INTERVAL)
            await asyncio.to_thread(release_free_memory)

    task = asyncio.create_task(release())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class ServerState:
    """What the routes of one app share. The lifespan of the app calls a function that loads the engine.

    ``scoring`` is held while given texts are scored, so that those of several requests take turns. Before it, a request
    holds ``first_texts`` with its first texts, and ``later_texts`` with others. First and later texts therefore
    alternate, and a new request waits for two of them, however many requests there are. ``error`` is why the model
    could not be loaded.
    """

    def __init__(self, engine: CocoaEngine | Loader, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.calls = Calls(on_cancel=lambda by: self.metrics.add("cancelled", 1, by))
        self.bodies = Bodies(settings.max_body_bytes)
        self.scoring, self.first_texts, self.later_texts = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self.started = int(time.time())
        self.error: BaseException | None = None
        self._loading: threading.Thread | None = None
        self._engine: CocoaEngine | None = None
        self._loader = None if isinstance(engine, CocoaEngine) else engine
        self.phase: Phase = "loading"
        if isinstance(engine, CocoaEngine):
            self._loaded(engine, None)

    @property
    def engine(self) -> CocoaEngine:
        """The engine, while calls are accepted; see :meth:`require_ready`."""
        self.require_ready()
        assert self._engine is not None
        return self._engine

    def require_ready(self) -> None:
        """Refuse a request with an :class:`ApiError` while no calls are accepted."""
        retry_after = max(1, self.settings.retry_after)
        if self.phase == "draining":
            raise shutting_down(retry_after)
        if self.phase != "ready":
            why = "is being loaded; try again later"
            if self.phase == "failed":
                why = "could not be loaded; the server's log has the reason"
            raise ApiError(503, f"the model {why}", code=f"model_{self.phase}", retry_after=retry_after)

    def shows_texts(self) -> bool:
        """Whether the log may have any text: it is allowed to have that of requests, or none was read yet."""
        return self.settings.log_prompts or self.phase == "loading"

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the model in the background, so that the server can say that it is loading. End all calls at the end."""
        self.phase = "loading" if self._engine is None else "ready"  # the app may have been stopped before
        if self._loader is not None and self._engine is None:
            loop = asyncio.get_running_loop()
            # a daemon, so that an interrupted server does not wait for the weights
            self._loading = threading.Thread(target=self._load, args=(self._loader, loop), daemon=True)
            self._loading.start()
        try:
            async with free_memory_released():
                yield
        finally:
            self.drain()
            self.calls.cancel()

    def drain(self) -> None:
        """Refuse further calls. Those that run go on."""
        if self.phase != "failed":
            self.phase = "draining"

    @property
    def loads(self) -> bool:
        """Whether a thread loads the model."""
        return self._loading is not None and self._loading.is_alive()

    def _load(self, loader: Loader, loop: asyncio.AbstractEventLoop) -> None:
        engine, error = None, None
        try:
            engine = loader()
        except BaseException as raised:  # any: the server must not report forever that it is loading
            error = raised
        with suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(self._loaded, engine, error)

    def _loaded(self, engine: CocoaEngine | None, error: BaseException | None) -> None:
        self._engine, self.error = engine, error
        if engine is None:
            logger.error("the model could not be loaded: %s", error)
            self.phase = "failed"
            return
        scheduler = engine.session.scheduler
        self.metrics.of_model(
            [*self.settings.served_names, engine.model_name][0],
            running=lambda: self.calls.answers - scheduler.waiting,
            waiting=lambda: scheduler.waiting,
        )
        if self.phase == "loading":
            self.phase = "ready"


def state_of(request: Request) -> ServerState:
    """The state of the app that a request was sent to."""
    return cast(ServerState, request.app.state.cocoa)


CLOSING = 5
"""Seconds in which ended answers are sent, before their connections are closed."""

ENDING = 0.5
"""Seconds in which cancelled work ends, and after it in which requests whose work goes on are answered."""


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
        own = {"host": settings.host, "port": settings.port, "timeout_graceful_shutdown": CLOSING}
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
            if count := engines.running():
                logger.warning("the process ends while %d worker threads run, which a cancellation did not end", count)
                os._exit(0)

        deadline = time.monotonic() + ENDING
        while self._ends_process and engines.running():
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
