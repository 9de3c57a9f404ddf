"""The cost of source attention: a step that measures it and one that captures hidden states alone."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench
from benchmarks.steps import Steps
from cocoa_engine import Runtime
from cocoa_engine.studies.timing import interleave, ratio, timed

WITH, WITHOUT = "with source attention", "without"
LONGEST = 2048
STEPS = 4  # per unit of work


def measure(bench: Bench) -> dict[str, Any]:
    """Seconds of a one-token step of the lean forward pass, after prompts of several lengths."""
    lengths = [length for length in bench.settings.lengths if length <= LONGEST]
    return {"lengths": {str(length): _steps(bench, length) for length in lengths}}


def _steps(bench: Bench, length: int) -> dict[str, Any]:
    after = Steps(bench, Runtime(), length)

    def steps(source: bool) -> int:
        for _ in range(STEPS):
            after.step(1, capturing=True, source=source)
        return STEPS

    # a unit is short: with many rounds, a single disturbance does not change the median
    rounds = 40 * bench.settings.rounds
    task = bench.progress.add_task(f"source attention, prompt of {length} tokens", total=2 * rounds)
    competitors = {WITH: timed(lambda _: steps(True)), WITHOUT: timed(lambda _: steps(False))}
    for competitor in competitors.values():
        competitor(None)
    seconds = interleave(competitors, [[None]] * rounds, lambda: bench.progress.advance(task))
    after.close()
    return {"seconds": seconds, "with_to_without": ratio(seconds[WITH], seconds[WITHOUT])._asdict()}


if __name__ == "__main__":
    main("source_attention")
