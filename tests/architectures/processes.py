"""Runs each architecture in a process of its own, with limits of memory and time, two at once."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait

from tests.architectures.sweep import Outcome, examine

MEMORY = 6 * 2**30
"""Bytes of address space of a process. The default sizes of a field that is not shrunk would exceed them."""

CPU_SECONDS = 200
SECONDS = 900
"""Of an idle processor, and by the clock: other work may share the machine."""


def examine_each(model_types: Iterable[str], *, workers: int = 2) -> Iterator[Outcome]:
    """The outcome of each architecture, in the order in which they are done.

    The processes are forked: importing transformers in each would take longer than the comparison. No engine exists in
    this process, and torch computes with one thread.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(model_types)
    running: dict[Connection, tuple[str, multiprocessing.process.BaseProcess, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(name, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = (name, process, time.monotonic() + SECONDS)
            wait(list(running), timeout=1)
            for pipe, (name, process, end) in list(running.items()):
                outcome = _received(pipe, name, process, time.monotonic() > end)
                if outcome is not None:
                    del running[pipe]
                    yield outcome
    finally:
        for pipe, (_, process, _) in running.items():
            _end(pipe, process)


def _received(pipe: Connection, name: str, process: multiprocessing.process.BaseProcess, late: bool) -> Outcome | None:
    """What a process has sent, or why it never will; `None` while it works."""
    if pipe.poll():
        try:
            outcome = Outcome(**json.loads(pipe.recv_bytes()))
        except EOFError:
            process.join(timeout=SECONDS)
            outcome = Outcome(name, "failed", reason=f"its process ended with code {process.exitcode}")
    elif late:
        outcome = Outcome(name, "failed", reason=f"not done after {SECONDS} seconds")
    else:
        return None
    _end(pipe, process)
    return outcome


def _end(pipe: Connection, process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    process.join(timeout=SECONDS)
    pipe.close()


def _work(name: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send_bytes(json.dumps(examine(name).as_dict()).encode())
