"""What each further tip costs: a forward pass over several competing tokens, against one over a single token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench
from benchmarks.steps import MOST_TIPS, Steps
from cocoa_engine import Runtime
from cocoa_engine.studies.timing import interleave, ratio, timed


def measure(bench: Bench) -> dict[str, Any]:
    """Seconds of a pass by the number of its tips, after a short prompt and after the longest."""
    lengths = bench.settings.lengths
    return {"lengths": {str(length): _by_tips(bench, length) for length in (lengths[0], lengths[-1])}}


def _by_tips(bench: Bench, length: int) -> dict[str, Any]:
    steps = Steps(bench, Runtime(), length)

    def passing(tips: int) -> Callable[[None], int]:
        def work(_: None) -> int:
            steps.step(tips, capturing=True)
            return 1

        return work

    # a pass is short: many more rounds, so that one disturbance does not make the median
    rounds = 10 * bench.settings.rounds
    counts = range(1, MOST_TIPS + 1)
    task = bench.progress.add_task(f"tips, prompt of {length} tokens", total=MOST_TIPS * rounds)
    ways = {str(tips): timed(passing(tips)) for tips in counts}
    for way in ways.values():
        way(None)
    seconds = interleave(ways, [[None]] * rounds, lambda: bench.progress.advance(task))
    steps.close()
    return {
        "seconds": seconds,
        "to_one_tip": {tips: ratio(values, seconds["1"])._asdict() for tips, values in seconds.items()},
    }


if __name__ == "__main__":
    main("tips")
