"""The memory of the server after every 100 answers, with prefix caches of several sizes. No figure is a time.

The server runs in a process of its own: ``python -m benchmarks.serving.memory '{"port": 8000, ...}'``. It also says
what its memory is made of: the entries of the prefix cache, and what the C library's allocator has handed out or keeps.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.serving.client import ask_all
from benchmarks.serving.load import GLIBC, STREAMS
from benchmarks.serving.processes import Server, free_port, running
from benchmarks.serving.requests import PROMPTS, bodies

CURVES: dict[str, tuple[int, dict[str, str]]] = {
    "0 MiB, glibc's own arenas": (0, GLIBC),
    "256 MiB, glibc's own arenas": (256, GLIBC),
    "256 MiB, one arena": (256, {}),
}
"""The size of the prefix cache in MiB, and variables of the server's environment. 256 and one arena are the default."""

STEP = 100
"""Answers between two measurements."""

FLAT = 0.02
"""Memory is flat where the last measurements differ by less than this share."""
FLAT_STEPS = 5

PATH = "/benchmark/memory"
MIB = 2**20


def measure(steps: int, tokens: int, threads: int, folder: Path, streams: int = STREAMS) -> dict[str, Any]:
    """Measure each curve in a process of its own, one after the other.

    Args:
        steps: the largest number of measurements for a curve.
        tokens: ``max_tokens`` of a request.
        threads: threads of each process.
        folder: for logs.
        streams: requests at once.
    """
    curves: dict[str, list[dict[str, float]]] = {}
    for name, (size, variables) in CURVES.items():
        with mock.patch.dict(os.environ, variables):
            curves[name] = _curve(size, steps, streams, tokens, threads, folder / f"memory-{len(curves)}.log")
    return {"streams": streams, "max_tokens": tokens, "threads": threads, "step": STEP, "curves": curves}


def _curve(size: int, steps: int, streams: int, tokens: int, threads: int, log: Path) -> list[dict[str, float]]:
    port = free_port()
    options = json.dumps({"port": port, "threads": threads, "runtime": {"prefix_cache_mb": size}})
    command = [sys.executable, "-m", "benchmarks.serving.memory", options]
    asked = bodies(tokens)
    found: list[dict[str, float]] = []
    with running(command, port, threads, log) as server:
        while len(found) < steps and not is_flat(found):
            first = len(found) * STEP
            chosen = [asked[number % PROMPTS] for number in range(first, first + STEP)]
            answers = asyncio.run(ask_all(server.url, chosen, streams))
            failures = [one.failure for one in answers if one.failure is not None]
            if failures:
                raise RuntimeError(f"{len(failures)} of {STEP} requests failed: {failures[0]}")
            found.append({"answers": first + STEP, **_used(server)})
            print(size, found[-1], flush=True)
    return found


def is_flat(found: Sequence[Mapping[str, float]]) -> bool:
    """Whether memory did not change in the last steps."""
    last = [one["unique_mib"] for one in found[-FLAT_STEPS:]]
    return len(last) == FLAT_STEPS and max(last) <= (1 + FLAT) * min(last)


def _used(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(server.url + PATH, timeout=60) as response:
        parts: dict[str, float] = json.load(response)
    return {"unique_mib": server.usage()["unique_mib"], **parts}


_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


def _allocator() -> dict[str, float]:
    """MiB that the allocator has handed out, and that it keeps although they are free."""
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return {
        "handed_out_mib": round((info.uordblks + info.hblkhd) / MIB, 1),
        "free_mib": round(info.fordblks / MIB, 1),
    }


def _serve(port: int, threads: int, runtime: dict[str, int]) -> None:
    import torch

    from cocoa_engine import CocoaEngine, Runtime
    from cocoa_integrations.server import ServerSettings, create_app
    from cocoa_integrations.server.process import DrainingServer, keep_one_arena

    keep_one_arena()
    torch.set_num_threads(threads)
    engine = CocoaEngine.from_pretrained(dtype="float32", runtime=Runtime(**runtime))
    app = create_app(engine, ServerSettings(port=port))

    @app.get(PATH)
    async def memory() -> dict[str, float]:
        cache = getattr(engine.session.backend, "prefixes", None)
        return {"prefix_cache_mib": 0.0 if cache is None else round(cache.nbytes / MIB, 1), **_allocator()}

    DrainingServer(app, log_level="warning").run()


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
