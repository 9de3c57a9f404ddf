"""The cost of source attention: a step that measures it and one that captures hidden states alone."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench
from benchmarks.steps import Steps, with_and_without
from cocoa_engine import Runtime

WITH, WITHOUT = "with source attention", "without"
LONGEST = 2048
STEPS = 4  # per unit of work


def measure(bench: Bench) -> dict[str, Any]:
    """Seconds of a one-token step after prompts of several lengths, by the lean pass and through HF's modules."""
    lengths = [length for length in bench.settings.lengths if length <= LONGEST]
    lean = {str(length): _steps(bench, length, Runtime()) for length in lengths}
    modules = {f"{length:,}, HF modules": _steps(bench, length, Runtime(forward="modules")) for length in lengths}
    return {"lengths": lean | modules}


def _steps(bench: Bench, length: int, runtime: Runtime) -> dict[str, Any]:
    after = Steps(bench, runtime, length)

    def steps(source: bool) -> int:
        for _ in range(STEPS):
            after.step(capturing=True, source=source)
        return STEPS

    rounds = 4 * bench.settings.units * bench.settings.rounds
    found = with_and_without(bench, f"source attention, prompt of {length} tokens", (WITH, WITHOUT), steps, rounds)
    after.close()
    return found


if __name__ == "__main__":
    main("source_attention")
