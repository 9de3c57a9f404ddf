"""The cost of measuring the attention on passages: a step with the source attention alone, and with passages.

Run ``python -m benchmarks.passages --prompt-tokens 512``.
"""

from __future__ import annotations

import argparse
from functools import partial

from rich.console import Console

from benchmarks.measure import Bench, interleave, progress
from benchmarks.settings import Settings
from benchmarks.steps import Steps
from cocoa_engine import Runtime
from cocoa_engine.lab.timing import ratio, timed

COUNTS = (5, 20)
STEPS = 4  # per unit of work
FORWARDS = {"lean": Runtime(), "HF modules": Runtime(forward="modules")}


def main() -> None:
    """Print the ratio of the times of a step, by forward pass and number of passages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Hub name or folder; default: the embedded model")
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    options = parser.parse_args()
    console = Console(width=110)
    with progress() as shown:
        bench = Bench(Settings(model=options.model, threads=options.threads), shown)
        for name, runtime in FORWARDS.items():
            after = Steps(bench, runtime, options.prompt_tokens)

            competitors = {str(count): timed(partial(_steps, after, count)) for count in (0, *COUNTS)}
            for competitor in competitors.values():
                competitor(None)
            seconds = interleave(competitors, [[None]] * options.rounds)
            after.close()
            for count in COUNTS:
                found = ratio(seconds[str(count)], seconds["0"])
                console.print(
                    f"{name}, {options.prompt_tokens} tokens: {count} passages / none {found.median:.3f} "
                    f"({found.lowest:.3f} - {found.highest:.3f})"
                )


def _steps(after: Steps, passages: int, _: None) -> int:
    for _number in range(STEPS):
        after.step(capturing=True, passages=passages)
    return STEPS


if __name__ == "__main__":
    main()
