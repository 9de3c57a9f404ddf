"""Several questions answered together, of different lengths, against ``generate`` on the left-padded batch."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import BASE, COCOA_SIG, GREEDY, Bench, Ours, Prompts, Way, hugging_face
from benchmarks.prompts import QUESTIONS, questions


def measure(bench: Bench) -> dict[str, Any]:
    """A race for each batch size; time is per kept token of all rows."""
    settings = bench.settings
    prompts = questions(bench.loaded, len(QUESTIONS))
    sizes: dict[str, Any] = {}
    for size in settings.batches:
        rounds = settings.rounds if size in (4, 8) else min(2, settings.rounds)  # bars are set for 4 and 8
        engine = bench.engine(max_batch_size=size)
        ways: dict[str, Way] = {
            BASE: hugging_face(bench),
            GREEDY: Ours(engine, method="greedy", max_new_tokens=settings.tokens),
            COCOA_SIG: Ours(engine, method="cocoa-sig", max_new_tokens=settings.tokens),
        }
        cases: list[Prompts] = [
            [prompts[(number * size + row) % len(prompts)] for row in range(size)] for number in range(rounds)
        ]
        sizes[str(size)] = bench.race(f"batch of {size}", ways, [[case] for case in cases], warm_up=cases[0][:2])
    return {"sizes": sizes}


if __name__ == "__main__":
    main("batch")
