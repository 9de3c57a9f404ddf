"""The cost of a token by the maximum number of candidates at a risk point."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import Bench, Competitor, EngineCompetitor, one_by_one, rounds_of_parts
from benchmarks.prompts import questions


def measure(bench: Bench) -> dict[str, Any]:
    """Times of CoCoA-SIG with each ``max_candidates``. The base is 1, which is greedy decoding."""
    settings = bench.settings
    engine = bench.engine(draft_tokens=0)
    competitors: dict[str, Competitor] = {
        str(count): EngineCompetitor(engine, max_candidates=count, max_new_tokens=settings.tokens)
        for count in settings.candidates
    }
    cases = one_by_one(questions(bench.loaded, settings.prompts))
    return {"candidates": bench.compare("number of candidates", competitors, rounds_of_parts(cases, 2))}


if __name__ == "__main__":
    main("candidates")
