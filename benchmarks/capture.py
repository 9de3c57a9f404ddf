"""The cost of capturing the hidden states of the middle and final layers: a step with capture and one without."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.command import main
from benchmarks.measure import Bench
from benchmarks.steps import Steps, with_and_without
from cocoa_engine import Runtime

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
            states = after.step(capturing=capturing)
            if states is not None:  # sum them over a span, as the decode loop does
                summed = states if summed is None else summed + states
        return STEPS

    rounds = bench.settings.units * bench.settings.rounds
    found = with_and_without(bench, f"capture, {name}", (WITH, WITHOUT), steps, rounds)
    after.close()
    return found


if __name__ == "__main__":
    main("capture")
