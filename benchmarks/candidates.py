"""How the cost of a token grows with the number of candidates that may compete at a risk point."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench, Ours, Way, alone, parts
from benchmarks.prompts import questions


def measure(bench: Bench) -> dict[str, Any]:
    """CoCoA-SIG with each ``max_candidates``; 1 is greedy and the base."""
    settings = bench.settings
    engine = bench.engine(draft_tokens=0)
    ways: dict[str, Way] = {
        str(count): Ours(engine, max_candidates=count, max_new_tokens=settings.tokens) for count in settings.candidates
    }
    cases = alone(questions(bench.loaded, settings.prompts))
    return {"candidates": bench.race("number of candidates", ways, parts(cases, 2))}


if __name__ == "__main__":
    main("candidates")
