"""Decoding while other processes use the processor: two busy ones beside it, and none.

The busy processes are stopped and continued between the turns, so that all decoders alternate in both states.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.command import main
from benchmarks.measure import (
    BASE,
    COCOA_SIG,
    GREEDY,
    Bench,
    Competitor,
    EngineCompetitor,
    Prompts,
    hugging_face,
    interleave,
    one_by_one,
)
from benchmarks.probe import probe
from benchmarks.prompts import questions
from cocoa_engine.lab.timing import Spread, Turn, ratio

BUSY_PROCESSES = 2
STATES = ("idle", "busy")

Switch = Callable[[bool], None]


def measure(bench: Bench) -> dict[str, Any]:
    """For each state, the decoders' times and ratios to ``generate``, and the speed of the machine in that state."""
    tokens = bench.settings.tokens
    cases = one_by_one(questions(bench.loaded, bench.settings.prompts))
    engine = bench.engine()
    decoders: dict[str, Competitor] = {
        BASE: hugging_face(bench),
        GREEDY: EngineCompetitor(engine, method="greedy", max_new_tokens=tokens),
        COCOA_SIG: EngineCompetitor(engine, method="cocoa-sig", max_new_tokens=tokens),
    }
    for decoder in decoders.values():
        decoder(cases[0])
    with _busy_processes(BUSY_PROCESSES) as switch:
        competitors = {
            f"{state}: {name}": _in_state(decoder, state == "busy", switch)
            for state in STATES
            for name, decoder in decoders.items()
        }
        rounds = [cases] * bench.settings.rounds
        task = bench.progress.add_task("contention", total=len(competitors) * sum(map(len, rounds)))
        seconds = interleave(competitors, rounds, lambda: bench.progress.advance(task))
        speeds = {state: [_in_state(_probed, state == "busy", switch)(cases[0]) for _ in rounds] for state in STATES}
    return {
        "busy_processes": BUSY_PROCESSES,
        "base": BASE,
        "states": {
            state: {
                "competitors": {
                    name: {
                        "seconds": (own := seconds[f"{state}: {name}"]),
                        "ratio": ratio(own, seconds[f"{state}: {BASE}"])._asdict(),
                    }
                    for name in decoders
                },
                "machine_speed": {
                    name: Spread.of([one[name] for one in speeds[state]])._asdict() for name in speeds[state][0]
                },
            }
            for state in STATES
        },
    }


def _probed(_: Prompts) -> Any:
    return probe()


def _in_state(work: Callable[[Prompts], Any], busy: bool, switch: Switch) -> Callable[[Prompts], Any]:
    """The work, done while the busy processes run or stand still."""

    def turn(prompts: Prompts) -> Turn:
        switch(busy)
        try:
            found: Turn = work(prompts)
            return found
        finally:
            switch(False)

    return turn


@contextmanager
def _busy_processes(count: int) -> Iterator[Switch]:
    """Processes that compute without end, stopped at first, and a function that lets them run or stops them."""
    running: Sequence[subprocess.Popen[bytes]] = []
    try:
        running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

        def switch(busy: bool) -> None:
            for process in running:
                process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)

        switch(False)
        yield switch
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


if __name__ == "__main__":
    main("contention")
