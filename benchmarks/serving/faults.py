"""What goes wrong: a server that is killed under load, and clients that read slowly or never."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.serving.client import PATH, ask, ask_all, session
from benchmarks.serving.load import USAGE
from benchmarks.serving.processes import Server, cocoa_serve, free_port, load_average, running
from benchmarks.serving.requests import bodies

KILLED_STREAMS = 16


def kill(tokens: int, threads: int, folder: Path) -> dict[str, Any]:
    """``kill -9`` while streams run, and a new server on the same port."""
    port, asked = free_port(), [{**body, **USAGE} for body in bodies(tokens)]
    command, before = cocoa_serve(port, threads), load_average()

    async def load(server: Server) -> list[str | None]:
        async with session() as client:
            calls = [asyncio.ensure_future(ask(client, server.url, body)) for body in asked[:KILLED_STREAMS]]
            await asyncio.sleep(3)
            await asyncio.to_thread(server.kill)
            return [one.failure for one in await asyncio.gather(*calls)]

    with running(command, port, threads, folder / "killed.log") as server:
        asyncio.run(ask_all(server.url, asked[:1], 1))
        failures = asyncio.run(load(server))
    start = time.perf_counter()
    with running(command, port, threads, folder / "restarted.log") as server:
        ready = time.perf_counter() - start
        [answer] = asyncio.run(ask_all(server.url, asked[:1], 1))
    return {
        "streams": KILLED_STREAMS,
        "saw_an_error": sum(failure is not None for failure in failures),
        "errors": sorted({failure.partition(":")[0] for failure in failures if failure}),
        "seconds_to_ready": round(ready, 2),
        "served_after": answer.failure is None,
        "load_average": [before, load_average()],
    }


def readers(tokens: int, threads: int, folder: Path) -> dict[str, Any]:
    """Eight clients read nothing, and one reads slowly. Others are timed without and with these."""
    port, asked = free_port(), [{**body, **USAGE} for body in bodies(tokens)[:8]]
    before = load_average()
    with running(cocoa_serve(port, threads), port, threads, folder / "readers.log") as server:
        asyncio.run(ask_all(server.url, asked, 8))
        found = asyncio.run(_among_readers(port, server.url, asked))
    return {**found, "load_average": [before, load_average()]}


async def _among_readers(port: int, url: str, asked: list[dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    await ask_all(url, asked, 4)
    without = time.perf_counter() - start
    # as many tokens as fit, so that the sockets are full
    silent = [await _open(port, {**asked[0], "max_tokens": 4000, "n": 1}) for _ in range(8)]
    slow = asyncio.ensure_future(_read_slowly(port, asked[1]))
    start = time.perf_counter()
    answers = await ask_all(url, asked, 4)
    beside = time.perf_counter() - start
    complete = await slow
    for _, writer in silent:
        writer.close()
    return {
        "silent": len(silent),
        "failures": sum(one.failure is not None for one in answers),
        "seconds_without": round(without, 2),
        "seconds_beside": round(beside, 2),
        "slow_reader_complete": complete,
    }


async def _open(port: int, body: Mapping[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream, and read nothing of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    text = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    )
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + text)
    await writer.drain()
    return reader, writer


async def _read_slowly(port: int, body: Mapping[str, Any]) -> bool:
    """Read a stream in small pieces with pauses. Returns whether its end came."""
    reader, writer = await _open(port, body)
    got = b""
    while part := await asyncio.wait_for(reader.read(512), 120):
        got += part
        await asyncio.sleep(0.05)
    writer.close()
    return b"data: [DONE]" in got
