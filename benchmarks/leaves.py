"""The cost of further leaves: a forward pass over several competing tokens, compared with a pass over one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench
from benchmarks.steps import MAX_LEAVES, Steps
from cocoa_engine import Runtime
from cocoa_engine.lab.timing import interleave, ratio, timed


def measure(bench: Bench) -> dict[str, Any]:
    """Seconds of a forward pass by its number of leaves, after the shortest and after the longest prompt."""
    lengths = bench.settings.lengths
    return {"lengths": {str(length): _by_leaves(bench, length) for length in (lengths[0], lengths[-1])}}


def _by_leaves(bench: Bench, length: int) -> dict[str, Any]:
    steps = Steps(bench, Runtime(), length)

    def passing(leaves: int) -> Callable[[None], int]:
        def work(_: None) -> int:
            steps.step(leaves, capturing=True)
            return 1

        return work

    # a pass is short: with many rounds, a single disturbance does not change the median
    rounds = 10 * bench.settings.rounds
    counts = range(1, MAX_LEAVES + 1)
    task = bench.progress.add_task(f"leaves, prompt of {length} tokens", total=MAX_LEAVES * rounds)
    competitors = {str(leaves): timed(passing(leaves)) for leaves in counts}
    for competitor in competitors.values():
        competitor(None)
    seconds = interleave(competitors, [[None]] * rounds, lambda: bench.progress.advance(task))
    steps.close()
    return {
        "seconds": seconds,
        "to_one_leaf": {leaves: ratio(values, seconds["1"])._asdict() for leaves, values in seconds.items()},
    }


if __name__ == "__main__":
    main("leaves")
