"""CoCoA-SIG against the engine's own greedy decoding, with the state of the machine beside it.

Both decoders alternate prompt by prompt, with and without drafts, on the float32 weights and on a bfloat16 copy. The
questions are the eight of the single-stream comparison, and others on which nothing was tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.command import main
from benchmarks.measure import (
    COCOA_SIG,
    GREEDY,
    NO_DRAFTS,
    RATIO_SETUPS,
    WEIGHTS,
    Bench,
    EngineCompetitor,
    Prompts,
    one_by_one,
    rounds_of_parts,
)
from benchmarks.probe import probe
from benchmarks.prompts import questions, untuned_questions

PARTS = 5


def measure(bench: Bench) -> dict[str, Any]:
    """For each group of questions: the comparison, and the state of the machine around it."""
    settings = bench.settings
    tuned = one_by_one(questions(bench.loaded, settings.prompts))
    untuned = one_by_one(untuned_questions(bench.loaded, settings.untuned))
    groups: dict[str, Sequence[Sequence[Prompts]]] = {
        "the benchmark's questions": [tuned] * settings.rounds,
        "questions on which nothing was tuned": rounds_of_parts(untuned, PARTS),
    }
    found: dict[str, Any] = {}
    for name, rounds in groups.items():
        decoders = {
            f"{decoder}, {setup}": EngineCompetitor(
                bench.engine(
                    linears=WEIGHTS[setup.removesuffix(f", {NO_DRAFTS}")],
                    **({"draft_tokens": 0} if NO_DRAFTS in setup else {}),
                ),
                method=method,
                max_new_tokens=settings.tokens,
            )
            for setup in RATIO_SETUPS
            for decoder, method in ((GREEDY, "greedy"), (COCOA_SIG, "cocoa-sig"))
        }
        before = probe()
        comparison = bench.compare(f"ratio, {name}", decoders, rounds)
        found[name] = {
            "questions": len({tuple(prompt) for cases in rounds for (prompt,) in cases}),
            "machine_state": [before, probe()],
            "comparison": comparison,
        }
    return {"groups": found}


if __name__ == "__main__":
    main("ratio")
