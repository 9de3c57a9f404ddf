"""Start-up time in new processes: imports, loading, and the first span of the first and of a second call."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench, child
from benchmarks.prompts import QUESTIONS, encode_question
from cocoa_engine.lab.timing import Spread

STEPS = (
    "import cocoa_engine",
    "import CocoaEngine (torch, transformers)",
    "load",
    "first span",
    "first span, later call",
)

PROGRAM = """
import json, sys, time
model, threads, prompt = json.loads(sys.argv[1])
clock = [time.perf_counter()]
lap = lambda: clock.append(time.perf_counter())
import cocoa_engine; lap()
from cocoa_engine import CocoaEngine, Runtime; lap()
import torch; torch.set_num_threads(threads)
engine = CocoaEngine.from_pretrained(model, runtime=Runtime(prefix_cache_mb=0)); lap()
for _ in range(2):
    with engine.stream(prompt, max_new_tokens=64) as stream:
        next(stream); lap()
print(json.dumps([later - earlier for earlier, later in zip(clock, clock[1:])]))
"""


def measure(bench: Bench) -> dict[str, Any]:
    """Seconds of each step: median, lowest and highest over new processes."""
    settings = bench.settings
    argument = json.dumps([settings.model, settings.threads, encode_question(bench.loaded, QUESTIONS[0])])
    task = bench.progress.add_task("start of a process", total=settings.rounds)
    laps: list[list[float]] = []
    for _ in range(settings.rounds):
        laps.append(child("-c", PROGRAM, argument))
        bench.progress.advance(task)
    seconds = {step: [lap[number] for lap in laps] for number, step in enumerate(STEPS)}
    return {"steps": {step: {"seconds": values, **Spread.of(values)._asdict()} for step, values in seconds.items()}}


if __name__ == "__main__":
    main("startup")
