"""Servers in processes of their own, all forked from one that has imported what they need."""

import asyncio
import ctypes
import importlib
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from cocoa_integrations.server import ServerSettings, create_app
from cocoa_integrations.server.errors import unhandled_logged
from cocoa_integrations.server.process import DrainingServer, keep_one_arena, listening
from tests.helpers.in_threads import together
from tests.helpers.reasoning_models import speaker
from tests.helpers.served import PATIENCE

STARTS = 120.0
"""Seconds in which the first process has imported everything, or it is taken to be stuck."""

STUCK = 200
"""Tokens of a prompt at which a forward pass of :func:`serve` does not end."""


@contextmanager
def server_process(target: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Callable[[], str]]]:
    """A process that begins a server, and what waits for the address of the next server that it begins.

    It is killed at the end.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__])
    ports, sent = forks.Pipe(duplex=False)
    process = forks.Process(target=target, args=(sent, *args))

    def address() -> str:
        assert ports.poll(STARTS)
        return f"http://127.0.0.1:{ports.recv()}"

    process.start()
    try:
        yield process, address
    finally:
        process.kill()
        process.join(PATIENCE)


def serves(url: str) -> bool:
    """Whether a server is ready."""
    try:
        return httpx.get(url + "/health", timeout=PATIENCE).status_code == 200
    except httpx.HTTPError:
        return False


def serve(ports: Connection, **options: Any) -> None:
    """Run a server of a :func:`speaker` with some options. It ends its process."""
    engine, settings = speaker(**options), ServerSettings(port=0, shutdown_timeout=0)
    forward: Any = engine.model.forward

    def stuck(*args: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] > STUCK:
            time.sleep(10**4)
        return forward(*args, **inputs)

    engine.model.forward = stuck
    server = DrainingServer(create_app(engine, settings), ends_process=True, log_level="error")
    opened = listening(settings)
    ports.send(opened.getsockname()[1])
    server.run(sockets=[opened])


def _write_to(output: Path) -> None:
    """Let a file have all that this process writes."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def write_arenas(kept: Connection, output: Path, keep: bool, variables: dict[str, str]) -> None:
    """Write the allocator's statistics of each arena while there are six threads beside the main one."""
    _write_to(output)
    for name in ("ray", "server.command"):  # imports choose nothing
        importlib.import_module(f"cocoa_integrations.{name}")
    os.environ.update(variables)
    kept.send(keep and keep_one_arena())
    library, all_there = ctypes.CDLL(None), threading.Barrier(6)

    def work() -> None:
        library.malloc(100)  # its first allocation gives a thread its arena
        all_there.wait(PATIENCE)

    together([work] * 6)
    library.malloc_stats()


class Failing:
    """Says a text when it is freed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __del__(self) -> None:
        raise ValueError(self.text)


def raise_in_thread(text: str) -> None:
    raise ValueError(text)


def quote(ports: Connection, output: Path) -> None:
    """Run a server whose engine writes its questions wherever it can, and then another one that may show them."""
    _write_to(output)
    warnings.simplefilter("default")
    engine = speaker()

    def chat(messages: Any, **options: Any) -> Any:
        text = messages[0]["content"]
        warnings.warn(text, stacklevel=1)
        foreign = logging.getLogger("another.package")
        foreign.error(text)
        foreign.error("a template: %s", text)
        foreign.error("a template of two: %s %s", text)
        logging.getLogger("transformers.generation").warning(text)
        thread = threading.Thread(target=raise_in_thread, args=(text,))
        thread.start()
        thread.join(PATIENCE)
        Failing(text)
        loop.call_soon_threadsafe(raise_in_thread, text)
        try:
            raise KeyError(text)
        except KeyError as error:
            foreign.exception("an error")
            raise RuntimeError(text) from error

    async def run(server: DrainingServer, opened: Any) -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        await server.serve([opened])

    loop: Any = None
    engine.chat = chat  # type: ignore[method-assign]
    for log_prompts in (False, True):
        settings = ServerSettings(port=0, shutdown_timeout=0, log_prompts=log_prompts)
        app = create_app(engine, settings)
        server = DrainingServer(app)
        opened = listening(settings)
        ports.send(opened.getsockname()[1])
        with unhandled_logged(app.state.cocoa.shows_texts):
            asyncio.run(run(server, opened), debug=True)
