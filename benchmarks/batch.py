"""Batches of questions of different lengths, compared with ``generate`` on the left-padded batch."""

from __future__ import annotations

from typing import Any

from benchmarks.command import main
from benchmarks.measure import BASE, COCOA_SIG, GREEDY, Bench, Competitor, EngineCompetitor, Prompts, hugging_face
from benchmarks.prompts import QUESTIONS, questions


def measure(bench: Bench) -> dict[str, Any]:
    """A comparison for each batch size; time is per kept token of all rows."""
    settings = bench.settings
    prompts = questions(bench.loaded, len(QUESTIONS))
    sizes: dict[str, Any] = {}
    for size in settings.batches:
        rounds = settings.rounds if size in (4, 8) else min(2, settings.rounds)  # 4 and 8 have targets
        engine = bench.engine(max_batch_size=size)
        decoders: dict[str, Competitor] = {
            BASE: hugging_face(bench),
            GREEDY: EngineCompetitor(engine, method="greedy", max_new_tokens=settings.tokens),
            COCOA_SIG: EngineCompetitor(engine, method="cocoa-sig", max_new_tokens=settings.tokens),
        }
        cases: list[Prompts] = [
            [prompts[(number * size + row) % len(prompts)] for row in range(size)] for number in range(rounds)
        ]
        sizes[str(size)] = bench.compare(f"batch of {size}", decoders, [[case] for case in cases], warm_up=cases[0][:2])
    return {"sizes": sizes}


if __name__ == "__main__":
    main("batch")
