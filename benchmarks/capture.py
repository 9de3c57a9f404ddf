"""The cost of capturing the hidden states of the middle and final layers: a step with capture and one without."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.command import main
from benchmarks.measure import Bench
from benchmarks.steps import Steps
from cocoa_engine import Runtime
from cocoa_engine.studies.timing import interleave, ratio, timed

WITH, WITHOUT = "with capture", "without"
PROMPT_TOKENS = 256
STEPS = 8  # per unit of work
FORWARDS = {"lean": Runtime(), "HF modules": Runtime(forward="modules")}


def measure(bench: Bench) -> dict[str, Any]:
    """Seconds of a one-token step after a prompt, through the lean forward pass and through HF's modules."""
    return {"forwards": {name: _steps(bench, name, runtime) for name, runtime in FORWARDS.items()}}


def _steps(bench: Bench, name: str, runtime: Runtime) -> dict[str, Any]:
    after = Steps(bench, runtime, PROMPT_TOKENS)

    def steps(capturing: bool) -> int:
        summed: torch.Tensor | None = None
        for _ in range(STEPS):
            states = after.step(1, capturing=capturing)
            if states is not None:  # sum them over a span, as the decode loop does
                summed = states if summed is None else summed + states
        return STEPS

    # a unit is short: with ten times the rounds, a single disturbance does not change the median
    rounds = 10 * bench.settings.rounds
    task = bench.progress.add_task(f"capture, {name}", total=2 * rounds)
    competitors = {WITH: timed(lambda _: steps(True)), WITHOUT: timed(lambda _: steps(False))}
    for competitor in competitors.values():
        competitor(None)
    seconds = interleave(competitors, [[None]] * rounds, lambda: bench.progress.advance(task))
    after.close()
    return {"seconds": seconds, "with_to_without": ratio(seconds[WITH], seconds[WITHOUT])._asdict()}


if __name__ == "__main__":
    main("capture")
