"""64 streams at once: errors, texts, memory and latency over minutes, and throughput beside the engine alone."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.serving.client import Streamed, ask_all
from benchmarks.serving.in_process import in_process
from benchmarks.serving.processes import (
    Server,
    cocoa_serve,
    free_port,
    load_average,
    running,
)
from benchmarks.serving.requests import bodies
from cocoa_engine.lab.timing import Spread, ratio

STREAMS = 64
ALLOCATORS: dict[str, dict[str, str]] = {
    "one arena, the default": {},
    "glibc's own arenas": {"MALLOC_ARENA_MAX": "0"},
}
"""Variables of the server's environment. With 0 ``cocoa serve`` leaves the C library's allocator alone."""

USAGE = {"stream_options": {"include_usage": True}}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def fifths(values: Sequence[float]) -> list[float]:
    """The median of each fifth of a run."""
    bounds = [round(number * len(values) / 5) for number in range(6)]
    parts = [values[start:end] for start, end in itertools.pairwise(bounds)]
    return [round(statistics.median(part), 1) for part in parts if part]


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, in seconds."""
    return {"median": round(statistics.median(values), 4), "p99": round(percentile(values, 0.99), 4)}


def latencies(answers: Sequence[Streamed]) -> dict[str, Any]:
    """Time to the first span and between spans, of complete answers."""
    between = [gap for one in answers for gap in one.between]
    return {"to_first": spread_of([one.to_first for one in answers]), "between": spread_of(between)}


def timed_round(server: Server, asked: Sequence[Mapping[str, Any]], at_once: int) -> tuple[list[Streamed], float]:
    """Ask all requests once. Returns the answers, and the seconds until the last one was complete."""
    start = time.perf_counter()
    answers = asyncio.run(ask_all(server.url, asked, at_once))
    return answers, time.perf_counter() - start


def measure(minutes: float, rounds: int, tokens: int, threads: int, batch: int, folder: Path) -> dict[str, Any]:
    """Measure.

    Args:
        minutes: how long the streams go on.
        rounds: rounds of the comparison with the engine alone.
        tokens: ``max_tokens`` of a request.
        threads: threads of each process.
        batch: ``max_batch_size`` of both.
        folder: for logs.
    """
    plain = bodies(tokens)
    asked = [{**body, **USAGE} for body in plain]
    port, before = free_port(), load_average()
    command = cocoa_serve(port, threads, "--max-batch-size", str(batch))
    with (
        running(command, port, threads, folder / "load.log") as server,
        in_process(threads, {"max_batch_size": batch}) as engine,
    ):
        alone = engine.run(plain, 1)["texts"]
        # each reads all prompts once before it is timed, so that both have the same cached
        asyncio.run(ask_all(server.url, asked, STREAMS))
        engine.run(plain, STREAMS)
        compared = []
        for _ in range(rounds):
            spent = server.usage()["processor_seconds"]
            answers, seconds = timed_round(server, asked, STREAMS)
            served = sum(one.tokens for one in answers)
            spent = server.usage()["processor_seconds"] - spent
            result = engine.run(plain, STREAMS)
            own = sum(result["tokens"])
            compared.append(
                {
                    "server_tokens_per_second": served / seconds,
                    "engine_tokens_per_second": own / result["seconds"],
                    "overhead": (own / result["seconds"]) / (served / seconds) - 1,
                    "processor_overhead": (spent / served) / (result["processor_seconds"] / own) - 1,
                    "same_tokens": sum(a == b for a, b in zip(_texts(answers), result["texts"], strict=True)),
                    "load_average": load_average(),
                }
            )
        long = _long(server, asked, minutes)
        other_texts = sum(one.text != alone[one.number] for one in long.complete)
    return {
        "streams": STREAMS,
        "max_batch_size": batch,
        "threads": threads,
        "max_tokens": tokens,
        "load_average": [before, load_average()],
        "long": {**long.record, "other_texts": other_texts},
        "rounds": compared,
        **{name: Spread.of([one[name] for one in compared])._asdict() for name in ("overhead", "processor_overhead")},
    }


def memory(minutes: float, rounds: int, tokens: int, threads: int, batch: int, folder: Path) -> dict[str, Any]:
    """Measure the memory of the server under the same load, with and without its setting of the C library's allocator.

    Both servers stream for minutes at the same time, so that they meet the same state of the machine. They then answer
    all requests in turns, for what the setting costs.

    Args:
        minutes: how long the streams go on.
        rounds: rounds of the comparison.
        tokens: ``max_tokens`` of a request.
        threads: threads of each process.
        batch: ``max_batch_size`` of both.
        folder: for logs.
    """
    asked = [{**body, **USAGE} for body in bodies(tokens)]
    before = load_average()
    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        for name, variables in ALLOCATORS.items():
            port = free_port()
            command = cocoa_serve(port, threads, "--max-batch-size", str(batch))
            with mock.patch.dict(os.environ, variables):
                log = folder / f"load-memory-{len(servers)}.log"
                servers[name] = stack.enter_context(running(command, port, threads, log))
        with ThreadPoolExecutor(len(servers)) as pool:
            streamed = pool.map(lambda server: _long(server, asked, minutes).record, servers.values())
            allocators = dict(zip(servers, streamed, strict=True))
        after = load_average()
        speeds: dict[str, list[float]] = {name: [] for name in servers}
        spent: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                start = server.usage()["processor_seconds"]
                answers, seconds = timed_round(server, asked, STREAMS)
                count = sum(one.tokens for one in answers)
                speeds[name].append(count / seconds)
                spent[name].append((server.usage()["processor_seconds"] - start) / count)
    ours, glibc = ALLOCATORS
    return {
        "streams": STREAMS,
        "max_batch_size": batch,
        "threads": threads,
        "max_tokens": tokens,
        "load_average": [before, after],
        "allocators": allocators,
        "rounds": {"tokens_per_second": speeds, "processor_seconds_per_token": spent},
        "speed": ratio(speeds[ours], speeds[glibc])._asdict(),
        "processor_time": ratio(spent[ours], spent[glibc])._asdict(),
    }


def _texts(answers: Sequence[Streamed]) -> list[str]:
    return [one.text for one in sorted(answers, key=lambda one: one.number)]


@dataclass(frozen=True)
class _Long:
    """Streams that went on for minutes.

    Attributes:
        record: what was measured.
        complete: the complete answers.
    """

    record: dict[str, Any]
    complete: Sequence[Streamed]


def _long(server: Server, asked: Sequence[Mapping[str, Any]], minutes: float) -> _Long:
    """The streams go on for minutes, while the memory of the server is sampled each second."""
    samples: list[dict[str, float]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(1.0):
            samples.append(server.usage())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    start = time.perf_counter()
    answers = asyncio.run(ask_all(server.url, asked, STREAMS, until=start + 60 * minutes))
    seconds = time.perf_counter() - start
    over.set()
    sampler.join()
    failures = [one.failure for one in answers if one.failure is not None]
    complete = [one for one in answers if one.failure is None]
    memory = [one["unique_mib"] for one in samples]
    record = {
        "seconds": round(seconds, 1),
        "answers": len(complete),
        "failures": len(failures),
        "first_failures": failures[:5],
        "refusals": sum(one.refusals for one in answers),
        "tokens_per_second": round(sum(one.tokens for one in complete) / seconds, 2),
        "memory_mib": {"fifths": fifths(memory), "highest": max(memory)},
        **latencies(complete),
    }
    return _Long(record, complete)
