"""The engine without a server, in a process of its own: threads that stream the answers to the same requests.

The process reads one job a line, ``{"bodies": [...], "at_once": n}``, and writes one result a line.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.serving.client import Body
from benchmarks.serving.processes import environment


class InProcess:
    """The process.

    Args:
        process: the started process.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, bodies: Sequence[Body], at_once: int) -> dict[str, Any]:
        """Answer requests.

        Returns:
            ``seconds`` and ``processor_seconds``; by request ``texts``, ``tokens``, ``to_first`` and ``between``.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"bodies": bodies, "at_once": at_once}), file=self._process.stdin, flush=True)
        result: dict[str, Any] = json.loads(self._process.stdout.readline())
        return result


@contextmanager
def in_process(threads: int, runtime: dict[str, int]) -> Iterator[InProcess]:
    """An engine in a new process, within the context."""
    command = [sys.executable, "-m", __name__, json.dumps({"threads": threads, "runtime": runtime})]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(threads), stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield InProcess(process)
        finally:
            process.kill()


def _main(threads: int, runtime: dict[str, int]) -> None:
    import torch

    from cocoa_engine import CocoaEngine, Runtime

    torch.set_num_threads(threads)
    engine = CocoaEngine.from_pretrained(runtime=Runtime(**runtime))
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_answer(engine, job["bodies"], job["at_once"])), flush=True)


def _answer(engine: Any, bodies: Sequence[Body], at_once: int) -> dict[str, Any]:
    numbers, lock = iter(range(len(bodies))), threading.Lock()
    found: list[tuple[int, str, int, list[float]]] = []

    def worker() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            body = bodies[number]
            times, texts = [time.perf_counter()], []
            config = engine.config.replace(max_new_tokens=body["max_tokens"], **body.get("cocoa", {}))
            with engine.stream_chat(body["messages"], config=config) as stream:
                for span in stream:
                    times.append(time.perf_counter())
                    texts.append(span.text)
            found.append((number, "".join(texts), stream.generation.usage.completion_tokens, times))

    threads = [threading.Thread(target=worker) for _ in range(at_once)]
    start, spent = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, spent = time.perf_counter() - start, time.process_time() - spent
    found.sort()
    return {
        "seconds": seconds,
        "processor_seconds": spent,
        "texts": [text for _, text, _, _ in found],
        "tokens": [tokens for _, _, tokens, _ in found],
        "to_first": [times[1] - times[0] for *_, times in found],
        "between": [[b - a for a, b in itertools.pairwise(times[1:])] for *_, times in found],
    }


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
