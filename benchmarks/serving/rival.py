"""``cocoa serve`` beside ``transformers serve``: the same model, threads and requests, greedy, in turns."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.serving.client import Streamed, ask_all
from benchmarks.serving.load import USAGE, timed_round
from benchmarks.serving.names import AT_ONCE, OURS, OURS_SIG, RIVAL, RIVAL_BATCHES
from benchmarks.serving.processes import Server, cocoa_serve, free_port, load_average, running, transformers_serve
from benchmarks.serving.requests import PROMPTS, bodies
from cocoa_engine import CocoaEngine, Runtime


def unpacked_into(folder: Path) -> CocoaEngine:
    """An engine with the embedded model in float32, which is saved as a checkpoint for transformers."""
    engine = CocoaEngine.from_pretrained(runtime=Runtime(weights="float32"))
    engine.model.save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)
    return engine


def measure(rounds: int, tokens: int, threads: int, folder: Path, at_once: Sequence[int] = AT_ONCE) -> dict[str, Any]:
    """Measure.

    Args:
        rounds: rounds for each number of streams.
        tokens: ``max_tokens`` of a request.
        threads: threads of each server.
        folder: for logs and the model.
        at_once: numbers of streams.
    """
    model, tokenizer = str(folder / "model"), unpacked_into(folder / "model").tokenizer
    plain = {"temperature": 0, "model": model}
    fields: dict[str, dict[str, Any]] = {
        OURS: {**plain, **USAGE, "cocoa": {"method": "greedy"}},
        OURS_SIG: {**plain, **USAGE, "cocoa": {"method": "cocoa-sig"}},
        RIVAL: plain,
        RIVAL_BATCHES: plain,
    }
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    before, failed = load_average(), {}
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        ours = free_port()
        command = cocoa_serve(ours, threads, "--max-batch-size", "32")
        servers[OURS] = servers[OURS_SIG] = stack.enter_context(running(command, ours, threads, folder / "ours.log"))
        for name, options in {
            RIVAL: [],
            RIVAL_BATCHES: ["--continuous-batching", "--cb-max-memory-percent", "0.1"],
        }.items():
            port = free_port()
            command = transformers_serve(port, model, *options)
            try:
                servers[name] = stack.enter_context(running(command, port, threads, folder / f"{len(servers)}.log"))
                warmed = asyncio.run(ask_all(servers[name].url, [body_of(0, tokens, fields[name])], 1))
                if (failure := warmed[0].failure) is not None:
                    raise RuntimeError(failure)
            except RuntimeError as error:
                failed[name] = str(error)[-500:]
                servers.pop(name, None)
        asyncio.run(ask_all(servers[OURS].url, [body_of(0, tokens, fields[OURS])], 1))
        number = 1
        for count in at_once:
            of_count: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for _ in range(rounds):
                chosen = range(number, number + max(4, count))
                number = chosen.stop
                for name, server in servers.items():
                    first = 0 if name != OURS_SIG else 1000 * PROMPTS  # it has the cached prompts of the other method
                    asked = [body_of(first + one, tokens, fields[name]) for one in chosen]
                    answers, seconds = timed_round(server, asked, count)
                    of_count[name].append(_figures(answers, seconds, tokenizer))
            found[str(count)] = of_count
    return {
        "threads": threads,
        "max_tokens": tokens,
        "load_average": [before, load_average()],
        "not_run": failed,
        "at_once": {count: {name: _median(of) for name, of in names.items()} for count, names in found.items()},
    }


def body_of(number: int, tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A request that shares its beginning with no other: the other server keeps no prompts, so ours must not gain."""
    every = bodies(tokens, **fields)
    body = every[number % len(every)]
    [message] = body["messages"]
    system = {"role": "system", "content": f"You are assistant number {number}."}
    return {**body, "messages": [system, message]}


def _figures(answers: Sequence[Streamed], seconds: float, tokenizer: Any) -> dict[str, float]:
    """The tokens are counted by one tokenizer, from the texts."""
    complete = [one for one in answers if one.failure is None and one.pieces]
    tokens = sum(len(tokenizer.encode(one.text, add_special_tokens=False)) for one in complete)
    return {
        "answers": len(complete),
        "failures": len(answers) - len(complete),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "to_first": statistics.median([one.to_first for one in complete] or [float("inf")]),
    }


def _median(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]}
